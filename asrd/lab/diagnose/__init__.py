"""The paper's diagnostics. Those that need to know which tokens are wrong run on the packaged task, the others on any
model and prompts.

attention     how guidance and probe redistribute attention between masks, pending tokens and anchors
errors        error rate, long-span ratio R, contaminated anchors; annotations: error masks of an external annotator
runtime       time of a step by part, for each decoder
visible       whether a model is suited to revocation; partial_states: partially masked answers as decoder states
displacement  displacement of embeddings, against the paper's bounds
persistence   how many steps wrong predictions last

Shared: samples (prompts and answers), context (a model with a batch of prompts), intervals; report, reports and plots
turn results into tables, sentences and figures.
"""

from asrd.lab.diagnose.annotations import read_annotations
from asrd.lab.diagnose.attention import attention_redistribution
from asrd.lab.diagnose.displacement import displacements
from asrd.lab.diagnose.errors import annotated_errors, packaged_errors
from asrd.lab.diagnose.persistence import wrong_persistence
from asrd.lab.diagnose.runtime import runtime_breakdown
from asrd.lab.diagnose.samples import Sample, packaged_samples, read_samples
from asrd.lab.diagnose.visible import visible_behaviour

__all__ = [
    "Sample",
    "annotated_errors",
    "attention_redistribution",
    "displacements",
    "packaged_errors",
    "packaged_samples",
    "read_annotations",
    "read_samples",
    "runtime_breakdown",
    "visible_behaviour",
    "wrong_persistence",
]
