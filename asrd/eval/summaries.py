"""Scores of summaries: ROUGE-1 and ROUGE-L, and BERTScore where its model is on disk.

lm-eval's task downloads a model when the first summary is scored, and scores 0 if it cannot. Here ROUGE is computed as
it does (rouge_score with stemming, white space joined), and BERTScore is left out if the model is not there.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

BERT = "distilbert-base-uncased"  # lm-eval's
LAYERS = {  # whose output is compared: as chosen by BERTScore's authors
    "distilbert-base-uncased": 5, "distilroberta-base": 5, "bert-base-uncased": 9, "bert-large-uncased": 18,
    "roberta-base": 10, "roberta-large": 17, "deberta-xlarge-mnli": 40,
}  # fmt: skip
log = logging.getLogger("asrd")


def adapt(config: dict[str, Any], bert: str = BERT) -> str:
    """Replace the scoring of lm-eval's configuration; says which model BERTScore has, or why there is none."""
    scorer, about = bert_scorer(bert)
    names = ["rouge1", "rougeL", *(["bertscore_f1"] if scorer else [])]
    config["process_results"] = lambda document, results: scores(results[0], document["highlights"], scorer)
    config["metric_list"] = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]
    return about


def scores(summary: str, reference: str, scorer: BertScorer | None = None) -> dict[str, float]:
    """F-measures from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer

    summary, reference = " ".join(summary.split()), " ".join(reference.split())
    found = RougeScorer(["rouge1", "rougeL"], use_stemmer=True).score(reference, summary)
    result = {name: found[name].fmeasure for name in ("rouge1", "rougeL")}
    return result if scorer is None else result | {"bertscore_f1": scorer(summary, reference)}


class BertScorer:
    """BERTScore's F1 (Zhang et al., 2020): each token is matched with the most similar one of the other text, by the
    cosine of their vectors in one layer; without inverse document frequencies and without rescaling. The first and last
    token, which are special, have no weight."""

    def __init__(self, model: Any, tokenizer: Any, layer: int) -> None:
        self.model, self.tokenizer, self.layer = model.eval(), tokenizer, layer

    def __call__(self, summary: str, reference: str) -> float:
        ours, theirs = self._vectors(summary), self._vectors(reference)
        if min(len(ours), len(theirs)) < 3:  # an empty text
            return 0.0
        similarity = ours @ theirs.T
        precision, recall = (float(best[1:-1].mean()) for best in (similarity.amax(1), similarity.amax(0)))
        return 2 * precision * recall / (precision + recall) if precision + recall else 0.0

    @torch.no_grad()
    def _vectors(self, text: str) -> Tensor:
        """[tokens, D], each of length 1."""
        longest = min(self.tokenizer.model_max_length, 512)
        text = f" {text}" if self.model.config.model_type == "roberta" else text  # as a word within a text
        ids = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=longest)["input_ids"]
        hidden = self.model(input_ids=ids, output_hidden_states=True).hidden_states[self.layer][0]
        return torch.nn.functional.normalize(hidden, dim=-1)


@functools.cache
def bert_scorer(name: str) -> tuple[BertScorer | None, str]:
    """BERTScore with a model on disk: a folder or the name of one in the Hub's cache, and `:LAYER` if it is none of
    LAYERS. None if it is not there; and what was taken, or why there is none."""
    from transformers import AutoModel, AutoTokenizer

    path, _, number = name.partition(":")
    known = LAYERS.get(path.rstrip("/").rpartition("/")[2])
    if not number.isdigit() and known is None:
        raise ValueError(
            f"--bertscore {name}: say which layer counts, as {path}:LAYER; it is known for {', '.join(LAYERS)}"
        )
    layer = int(number) if number.isdigit() else known
    try:
        model = AutoModel.from_pretrained(path, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        log.warning("no BERTScore: its model %s is not on disk (hf download %s, or another by --bertscore)", path, path)
        return None, f"none: {path} is not on disk"
    assert layer is not None
    if layer > model.config.num_hidden_layers:
        raise ValueError(f"--bertscore {name}: the model has {model.config.num_hidden_layers} layers")
    return BertScorer(model, tokenizer, layer), f"{path}, layer {layer}"
