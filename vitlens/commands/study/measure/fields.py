"""What some kinds show beside accuracies: receptive fields (of the first seed's trainings), and an image."""

from typing import Final

import torch

from vitlens.analysis.features.receptive_field import receptive_field
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.shared.receptive import write_fields
from vitlens.commands.study.kinds import Kind
from vitlens.commands.study.measure.trial import StudySetup
from vitlens.commands.study.record import CUT, POINTS_FOLDER, CutArrays
from vitlens.models.loading import load

IMAGES: Final = 16  # of the test images


def write_point_fields(folder: RunFolder, kind: Kind, setup: StudySetup) -> None:
    """Write the receptive field of every layer of every point, of a kind that asks for it."""
    if not kind.fields:
        return
    images = setup.test.pick(torch.arange(min(IMAGES, len(setup.test))))
    (batch,) = images.batches(len(images), device=setup.device)
    fields = {}
    for point in kind.points:
        path = folder.path / POINTS_FOLDER / point.label / f"seed-{setup.options.seed}"
        fields[point.label, point.words] = receptive_field(load(str(path), device=setup.device), batch.images)
    write_fields(folder, fields)


def write_cut_image(folder: RunFolder, kind: Kind, setup: StudySetup) -> None:
    """Write the first test image, which the report shows as the patches of each point, of a kind that asks for it."""
    if kind.cuts:
        folder.save(CUT, CutArrays(setup.test.source.read(torch.arange(1)).numpy()))
