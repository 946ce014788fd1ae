"""Looking inside: the paper's diagnostics, on any model where they can be, on the packaged task where truth is needed.

attention     how guidance and probe redistribute attention between masks, pending tokens and anchors
errors        error rate, long-span ratio R, contaminated anchors; annotations: masks of an outside annotator
runtime       where a step's time goes, for each decoder
visible       is this model fit for revocation?; scenes: half-masked answers as states
displacement  how far embeddings are moved, against the paper's bounds
persistence   how long wrong predictions last

What they share: samples (prompts and answers), stage (a model and a batch of prompts), intervals; report, reports and
pictures make tables, sentences and plots of the results.
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
