"""Fingerprints change with what they are of, and with nothing else; a mismatch names both sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest
from paddlenlp.transformers import BertConfig, BertForMaskedLM, BertTokenizer

from paddlenlp_nebula.distill.identity import (
    Identity,
    batch_fingerprint,
    teacher_fingerprint,
    tokenizer_fingerprint,
)
from paddlenlp_nebula.errors import ProtocolError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "The", "Quick", "fox", "1", ",", "é", "e"]


def tokenizer(folder: Path, words: list[str] = WORDS, **settings: object) -> BertTokenizer:
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return BertTokenizer(str(folder / "vocab.txt"), **settings)


def test_a_tokenizer_is_what_it_does_wherever_it_lies(tmp_path: Path) -> None:
    first = tokenizer(tmp_path / "a")
    prints = {
        "the same": tokenizer_fingerprint(first),
        "elsewhere": tokenizer_fingerprint(tokenizer(tmp_path / "b")),
        "other order": tokenizer_fingerprint(tokenizer(tmp_path / "c", WORDS[:-2] + WORDS[:-3:-1])),
        "one more": tokenizer_fingerprint(tokenizer(tmp_path / "d", [*WORDS, "dog"])),
        "case": tokenizer_fingerprint(tokenizer(tmp_path / "e", do_lower_case=False)),
        "special": tokenizer_fingerprint(tokenizer(tmp_path / "f", mask_token="fox")),
    }
    first.add_tokens(["wolf"])
    prints["added"] = tokenizer_fingerprint(first)
    assert prints["the same"] == prints["elsewhere"]
    assert len(set(prints.values())) == len(prints) - 1


def model(seed: int = 0, **settings: object) -> BertForMaskedLM:
    paddle.seed(seed)
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(**{**sizes, "vocab_size": 20, "max_position_embeddings": 8, **settings}))


def test_a_teacher_is_its_configuration_and_its_numbers() -> None:
    first = teacher_fingerprint(model())
    assert teacher_fingerprint(model()) == first
    elsewhere = model()
    elsewhere.config._name_or_path, elsewhere.config.recompute = "/somewhere/else", True
    assert teacher_fingerprint(elsewhere) == first
    changed = model()
    with paddle.no_grad():
        changed.bert.pooler.dense.bias[3] += 1e-6
    others = [
        model(seed=1),
        model(layer_norm_eps=1e-5),
        model(hidden_act="relu"),
        model().to(dtype="bfloat16"),
        changed,
    ]
    prints = {teacher_fingerprint(other) for other in others} | {teacher_fingerprint(model(), {"num_beams": 4})}
    assert len(prints | {first}) == len(others) + 2


def test_a_layer_without_a_configuration() -> None:
    paddle.seed(0)
    assert teacher_fingerprint(paddle.nn.Linear(2, 2)) != teacher_fingerprint(paddle.nn.Linear(2, 3))


def test_a_batch_is_its_numbers_by_name() -> None:
    ids = np.arange(6).reshape(2, 3)
    first = batch_fingerprint({"input_ids": ids, "mask": np.ones((2, 3), np.int64)})
    assert batch_fingerprint({"mask": np.ones((2, 3), bool), "input_ids": ids.astype(np.int32)}) == first
    others = [
        {"input_ids": ids.reshape(3, 2), "mask": np.ones((2, 3))},
        {"input_ids": ids[::-1], "mask": np.ones((2, 3))},
        {"input_id": ids, "mask": np.ones((2, 3))},
        {"input_ids": ids},
    ]
    assert len({first, *map(batch_fingerprint, others)}) == 5


IDENTITY = Identity(7, "0" * 31 + "1", "0" * 31 + "2", "0" * 31 + "3", "logits:top32+hidden:6")


def test_it_comes_back() -> None:
    packed = IDENTITY.pack()
    identity, rest = Identity.parse(memoryview(packed + b"more"), "east")
    assert identity == IDENTITY
    assert bytes(rest) == b"more"
    for cut in range(len(packed)):
        with pytest.raises(ProtocolError, match="east must"):
            Identity.parse(memoryview(packed[:cut]), "east")


@pytest.mark.parametrize("spec", [b"logits\x00", b"\xff", b"x\n"])
def test_a_spec_is_printable(spec: bytes) -> None:
    packed = IDENTITY.pack()[: -len(IDENTITY.knowledge) - 2] + len(spec).to_bytes(2, "big") + spec
    with pytest.raises(ProtocolError, match="east must name at most 512 bytes of knowledge"):
        Identity.parse(memoryview(packed), "east")


def test_a_long_spec_is_refused_before_it_is_read() -> None:
    packed = IDENTITY.pack()[: -len(IDENTITY.knowledge) - 2] + (513).to_bytes(2, "big") + b"x" * 513
    with pytest.raises(ProtocolError, match="at most 512 bytes"):
        Identity.parse(memoryview(packed), "east")


def changed(**values: object) -> Identity:
    return Identity(**{**vars(IDENTITY), **values})


def test_a_mismatch_names_all_that_differs_and_both_sides() -> None:
    IDENTITY.check(IDENTITY, "east")
    with pytest.raises(ProtocolError, match=rf"east .* about position 7, batch {'0' * 31}1, got position 8, batch f+:"):
        IDENTITY.check(changed(position=8, batch="f" * 32), "east")
    with pytest.raises(ProtocolError, match=r"about knowledge logits:top32\+hidden:6, got knowledge labels"):
        IDENTITY.check(changed(knowledge="labels"), "east")


def test_the_key_is_all_but_the_position_and_the_source_all_but_the_batch() -> None:
    assert changed(position=8).key == IDENTITY.key
    others = [changed(**{name: "f" * 32}) for name in ("batch", "tokenizer", "teacher", "knowledge")]
    assert len({IDENTITY.key, *(other.key for other in others)}) == 5
    assert [other.source == IDENTITY.source for other in others] == [True, False, False, False]
