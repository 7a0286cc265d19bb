"""The public names of vitlens and their modules."""

from vitlens.analysis.ablation.importance import ablate as ablate
from vitlens.analysis.attention.methods import relevance as relevance
from vitlens.analysis.attention.methods import rollout as rollout
from vitlens.analysis.attention.weights import attention as attention
from vitlens.analysis.cost.profile import profile as profile
from vitlens.analysis.dictionary.dictionary import Dictionary as Dictionary
from vitlens.analysis.dictionary.dictionary import load_sae as load_sae
from vitlens.analysis.dictionary.latents import name_latents as name_latents
from vitlens.analysis.evaluation.evaluate import evaluate as evaluate
from vitlens.analysis.evaluation.evaluate import images as images
from vitlens.analysis.failures.compare import compare as compare
from vitlens.analysis.failures.compare import shape_bias as shape_bias
from vitlens.analysis.features.features import features as features
from vitlens.analysis.features.neighbours import knn as knn
from vitlens.analysis.features.probe import probe as probe
from vitlens.analysis.features.similarity import similarity as similarity
from vitlens.analysis.heads.query_key import neurons as neurons
from vitlens.analysis.heads.query_key import query_key_map as query_key_map
from vitlens.analysis.heads.statistics import Statistics as Statistics
from vitlens.analysis.heads.statistics import statistics as statistics
from vitlens.analysis.naming.labels import name_heads as name_heads
from vitlens.analysis.patching.contribution import (
    direct_logit_attribution as direct_logit_attribution,
)
from vitlens.analysis.patching.logit_lens import logit_lens as logit_lens
from vitlens.analysis.reliance.reliance import reliance as reliance
from vitlens.analysis.walkthrough.attention_check import AttentionCheck as AttentionCheck
from vitlens.analysis.walkthrough.attention_check import check_attention as check_attention
from vitlens.analysis.walkthrough.public import walkthrough as walkthrough
from vitlens.analysis.walkthrough.reversal import reversal as reversal
from vitlens.attacks.attack import attack as attack
from vitlens.attribution.choice import choose_method as choose_method
from vitlens.attribution.explain import explain as explain
from vitlens.attribution.failures import failures as failures
from vitlens.attribution.look import look as look
from vitlens.attribution.refinement import Refinement as Refinement
from vitlens.commands.explain.verify import verify as verify
from vitlens.commands.run.reading import read as read
from vitlens.commands.shared.explorer_measure import attention_explorer as attention_explorer
from vitlens.commands.shared.explorer_measure import explorer as explorer
from vitlens.data.catalogue import load_data as load_data
from vitlens.data.split import Split as Split
from vitlens.lens.access import Place as Place
from vitlens.lens.call import AttentionCall as AttentionCall
from vitlens.lens.capture import capture as capture
from vitlens.lens.capture import observe as observe
from vitlens.lens.intervene import KnockOut as KnockOut
from vitlens.lens.intervene import intervene as intervene
from vitlens.lens.places import places as places
from vitlens.lens.replay import patch as patch
from vitlens.lens.replay import replay as replay
from vitlens.lists import list_attacks as list_attacks
from vitlens.lists import list_methods as list_methods
from vitlens.lists import list_models as list_models
from vitlens.lists import list_statistics as list_statistics
from vitlens.models.language_image import zero_shot as zero_shot
from vitlens.models.loading import load as load
from vitlens.models.model import Model as Model
from vitlens.models.wrap import wrap as wrap
from vitlens.notebook import show as show
from vitlens.notebook import show_board as show_board
from vitlens.notebook import show_heads as show_heads
from vitlens.training.dictionary import DictionaryPlan as DictionaryPlan
from vitlens.training.dictionary import fit_sae as fit_sae
from vitlens.training.loop import fit as _fit
from vitlens.version import __version__ as __version__

train = _fit
