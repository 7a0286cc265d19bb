"""The report of `vitlens brightness`, from its record."""

from typing import Final

from tests.contracts.throw_away.record import BrightnessRecord
from vitlens.charts import bars
from vitlens.report.sections import Chart, Glance, Report, Section

REPORT: Final = Report(
    BrightnessRecord,
    glance=(Glance("means", "brightness"),),
    unknown=lambda _: iter(["It is not what a model sees."]),
    sections=(
        Section(
            "How bright is each image?",
            "images_shown",
            says="{{ image }} has a mean pixel of {{ brightness }}.",
            columns=("image", "brightness"),
            charts=(
                Chart("brightness", bars("image", "brightness"), "Mean pixel of every image."),
            ),
        ),
    ),
)
