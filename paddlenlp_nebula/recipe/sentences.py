"""Labelled sentences, as the recipes for classifiers use them: read, checked, tokenized, scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_nebula.data.sections import Example, read_examples
from paddlenlp_nebula.errors import ConfigurationError, NebulaError

__all__ = ["Sentences", "find_data", "read_sentences", "score"]


@dataclass(frozen=True)
class Sentences:
    """Two parts of a data set.

    Attributes:
        train, dev: the parts.
        labels: of the first, sorted; their places are the classes' numbers.
    """

    train: Sequence[Example]
    dev: Sequence[Example]
    labels: Sequence[str]

    @property
    def majority(self) -> float:
        """Accuracy on the second part of always saying the commonest label of the first."""
        commonest = Counter(example.section for example in self.train).most_common(1)[0][0]
        return sum(example.section == commonest for example in self.dev) / len(self.dev)

    def tokenized(self, tokenizer: Any, max_length: int) -> tuple[Any, Any]:
        """Both parts as map-style datasets of ``{"input_ids", "token_type_ids", "labels"}``."""
        from paddlenlp.datasets import MapDataset

        number = {label: index for index, label in enumerate(self.labels)}
        train, dev = (
            MapDataset(
                [
                    {
                        **tokenizer(example.text, max_length=max_length, truncation=True),
                        "labels": number[example.section],
                    }
                    for example in part
                ]
            )
            for part in (self.train, self.dev)
        )
        return train, dev


def read_sentences(data_dir: str, eval_sentences: int) -> Sentences:
    """Read both parts.

    Args:
        data_dir: see `find_data`.
        eval_sentences: how many of the second part; 0 for all.

    Raises:
        ConfigurationError: there is no such folder.
        NebulaError: the second part has labels that the first has not.
    """
    folder = find_data(data_dir)
    train, dev = read_examples(folder / "train.tsv"), read_examples(folder / "dev.tsv")
    dev = dev[: eval_sentences or None]
    labels = sorted({example.section for example in train})
    if unknown := {example.section for example in dev} - set(labels):
        raise NebulaError(
            f"expected in {folder}/dev.tsv only labels of train.tsv, got also {', '.join(sorted(unknown))}"
        )
    return Sentences(train, dev, labels)


def find_data(data_dir: str) -> Path:
    """The folder called ``data_dir``: one of the user's, else a sample that comes with the package.

    Raises:
        ConfigurationError: if there is neither.
    """
    package = Path(__file__).parents[1]
    samples = (package / "shipped_recipes" / "data", package.parent / "recipes" / "data")
    for folder in (Path(data_dir), *(sample / data_dir for sample in samples)):
        if (folder / "train.tsv").is_file() and (folder / "dev.tsv").is_file():
            return folder
    raise ConfigurationError(
        [
            "data_dir must be a folder with train.tsv and dev.tsv, or the name of a sample that comes with the package "
            f"(libreoffice_help_sections), got {data_dir!r}"
        ]
    )


def score(predictions: Any) -> dict[str, float]:
    """Share of the sentences whose label is predicted, as a Trainer's ``compute_metrics``."""
    logits = predictions.predictions
    if isinstance(logits, tuple):  # the Trainer hands over what the model returned after the loss
        logits = logits[0]
    return {"accuracy": float((logits.argmax(axis=-1) == predictions.label_ids).mean())}
