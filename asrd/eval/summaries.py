"""Scores of summaries: ROUGE-1 and ROUGE-L, and BERTScore where its model is on disk.

lm-eval's task downloads a model when the first summary is scored, and scores 0 if it cannot. Here ROUGE is computed as
it does (rouge_score with stemming, white space joined), and BERTScore is left out if the model is not there.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

BERT = "distilbert-base-uncased"  # lm-eval's
log = logging.getLogger("asrd")


def adapt(config: dict[str, Any]) -> None:
    """Replace the scoring of lm-eval's configuration."""
    names = ["rouge1", "rougeL", *(["bertscore_f1"] if bert_scorer() is not None else [])]
    config["process_results"] = lambda document, results: scores(results[0], document["highlights"])
    config["metric_list"] = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


def scores(summary: str, reference: str) -> dict[str, float]:
    """F-measures from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer

    summary, reference = " ".join(summary.split()), " ".join(reference.split())
    found = RougeScorer(["rouge1", "rougeL"], use_stemmer=True).score(reference, summary)
    result = {name: found[name].fmeasure for name in ("rouge1", "rougeL")}
    scorer = bert_scorer()
    if scorer is not None:
        result["bertscore_f1"] = float(scorer.score([summary], [reference])[2][0])
    return result


@functools.cache
def bert_scorer() -> Any:
    """BERTScore's model; None if the library or the model is not there."""
    try:
        from bert_score import BERTScorer
        from transformers.utils import cached_file

        cached_file(BERT, "config.json", local_files_only=True)
        return BERTScorer(model_type=BERT, lang="en")
    except (ImportError, OSError) as error:
        log.warning("no BERTScore: %s", " ".join(str(error).split())[:120])
        return None
