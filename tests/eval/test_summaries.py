"""Scores of summaries: BERTScore as its authors define it, left out where its model is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast

pytest.importorskip("rouge_score")

from asrd.eval.summaries import BertScorer, bert_scorer, scores

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "mayor", "opens", "a", "costly", "bridge", "rain", "closes", "roads"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DistilBERT with a vocabulary of a few words."""
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]",
                                        cls_token="[CLS]", sep_token="[SEP]", model_max_length=32)  # fmt: skip
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=len(WORDS), dim=16, n_heads=2, n_layers=3, hidden_dim=32)
    place = tmp_path_factory.mktemp("bert")
    DistilBertModel(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@torch.no_grad()
def test_bertscore_is_the_greedy_match_of_cosines(folder: Path) -> None:
    scorer, about = bert_scorer(f"{folder}:2")
    assert isinstance(scorer, BertScorer)
    assert about.endswith("layer 2")
    ours, theirs = "mayor opens bridge", "a costly bridge opens roads"

    def vectors(text: str) -> list[torch.Tensor]:
        ids = torch.tensor([[2, *(WORDS.index(word) for word in text.split()), 3]])
        return list(scorer.model(ids, output_hidden_states=True).hidden_states[2][0])

    def best(of: list[torch.Tensor], among: list[torch.Tensor]) -> float:
        found = [max(float(torch.cosine_similarity(a, b, dim=0)) for b in among) for a in of[1:-1]]
        return sum(found) / len(found)

    precision, recall = best(vectors(ours), vectors(theirs)), best(vectors(theirs), vectors(ours))
    assert scorer(ours, theirs) == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-6)
    assert scorer(ours, ours) == pytest.approx(1, abs=1e-6)
    assert scorer("", theirs) == 0
    assert scores(ours, theirs, scorer)["bertscore_f1"] == scorer(ours, theirs)


def test_without_its_model_there_is_no_bertscore(tmp_path: Path) -> None:
    scorer, about = bert_scorer("distilbert-base-uncased")
    if scorer is None:
        assert about == "none: distilbert-base-uncased is not on disk"
    assert bert_scorer(f"{tmp_path}:3")[0] is None
    assert "bertscore_f1" not in scores("a bridge", "the bridge")


def test_a_model_of_unknown_layers_is_refused_with_what_to_say(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"--bertscore .*:LAYER"):
        bert_scorer(str(folder))
    with pytest.raises(ValueError, match="has 3 layers"):
        bert_scorer(f"{folder}:9")
