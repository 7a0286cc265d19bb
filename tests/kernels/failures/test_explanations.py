"""The choice of the properties that explain errors."""

from vitlens.analysis.failures.rows import CovariateRow, InterventionRow, explanations
from vitlens.uncertainty import Estimate


def covariate(name: str, *inseparable: str, p_joint: float = 0.001) -> CovariateRow:
    return CovariateRow(
        model="m",
        covariate=name,
        title=name,
        area=Estimate(0.8, 0.7, 0.9, 100, ""),
        errors=30,
        median_errors=1.0,
        median_correct=0.0,
        p_holm=0.001,
        likelihood_ratio=9.0,
        p_joint_holm=p_joint,
        inseparable=inseparable,
    )


def intervention(name: str, *, mended: int) -> InterventionRow:
    return InterventionRow(
        model="m",
        covariate=name,
        change="",
        control="",
        errors=30,
        mended=mended,
        control_mended=0,
        broken=0,
        control_broken=0,
        p=0.001,
        gain=Estimate(mended / 30, 0.0, 1.0, 100, "fraction"),
        p_holm=0.001,
        size=1.0,
        control_size=1.0,
    )


def explained(mended_by_contrast: int) -> list[str]:
    """Return the explanations, where contrast adds to brightness, but not the reverse."""
    rows = [covariate("brightness", "contrast"), covariate("contrast")]
    tests = [
        intervention("brightness", mended=20),
        intervention("contrast", mended=mended_by_contrast),
    ]
    return [cause.row.covariate for cause in explanations("m", rows, tests)]


def test_a_property_that_another_one_explains_is_left_out():
    assert explained(mended_by_contrast=20) == ["contrast"]


def test_a_refuted_property_explains_no_other():
    assert explained(mended_by_contrast=0) == ["brightness"]
