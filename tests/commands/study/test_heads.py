"""What a study says of the heads that matter."""

from types import SimpleNamespace

from vitlens.commands.study.report.whole import heads
from vitlens.uncertainty import Estimate


def test_a_head_that_matters_is_named_although_others_raise_the_loss_more(monkeypatch):
    known = {
        (0, head): SimpleNamespace(
            name=f"L0.H{head}",
            label="local",
            rows=(),
            main=SimpleNamespace(delta_loss=1.0 - 0.1 * head, matters=head == 6, loss=Estimate(0.4, unit="nats")),
        )
        for head in range(8)
    }
    monkeypatch.setattr(heads, "known_heads", lambda _study, _alias: known)
    (sentence,) = heads.head_sentences(None, "vit")
    assert "L0.H6" in sentence.text
    assert "L0.H0" not in sentence.text
