"""NebulaArguments: the environment fills in, and all that is wrong is said at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paddlenlp_nebula import NebulaArguments
from paddlenlp_nebula.errors import ConfigurationError

FILES = {"tls_ca": "ca.pem", "tls_cert": "west.pem", "tls_key": "west.key"}
GOOD = {"cluster": "west", "clusters": "west,east", "rendezvous": "127.0.0.1:29400", **FILES}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*GOOD, "tls_key_passphrase_file"):
        monkeypatch.delenv(f"NEBULA_{name.upper()}", raising=False)


def problems(**fields: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as wrong:
        NebulaArguments(**{**GOOD, **fields})
    return wrong.value.problems


def test_defaults() -> None:
    arguments = NebulaArguments(**GOOD)
    assert arguments.cluster_names == ("west", "east")
    assert (arguments.cluster_name, arguments.cluster_index) == ("west", 0)
    assert arguments.problems() == []
    assert (arguments.sync_strategy, arguments.sync_codec, arguments.sync_timeout_s) == ("every_step", "fp32", 600.0)


def test_the_environment_fills_in_what_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(f"NEBULA_{name.upper()}", value)
    assert NebulaArguments() == NebulaArguments(**GOOD)
    assert NebulaArguments(cluster="east").cluster_index == 1


def test_links_are_tls_and_need_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NebulaArguments(**GOOD).sync_security == "tls"
    (sentence,) = problems(tls_key=None)
    assert sentence.startswith("tls_key must be set for sync_security='tls'")
    assert "set the field or NEBULA_TLS_KEY;" in sentence
    (sentence,) = problems(**dict.fromkeys(FILES))
    assert sentence.startswith(
        "tls_ca, tls_cert, tls_key must be set for sync_security='tls', got nothing: make the files"
    )
    monkeypatch.setenv("NEBULA_TLS_KEY_PASSPHRASE_FILE", "passphrase")
    assert NebulaArguments(**GOOD).tls_key_passphrase_file == "passphrase"


def test_a_plain_link_is_asked_for_by_name_and_needs_no_files() -> None:
    assert NebulaArguments(**{**GOOD, **dict.fromkeys(FILES)}, sync_security="none").sync_security == "none"


@pytest.mark.parametrize("nothing_to_protect", [{"rendezvous": "loopback"}, {"clusters": "west"}])
def test_where_there_is_no_link_there_is_no_tls(nothing_to_protect: dict[str, str]) -> None:
    assert NebulaArguments(**{**GOOD, **dict.fromkeys(FILES), **nothing_to_protect}).sync_security == "none"


def test_where_tls_cannot_act() -> None:
    (sentence,) = problems(sync_security="tls", rendezvous="loopback")
    assert "cannot act with rendezvous='loopback', whose members are threads of one process" in sentence
    (sentence,) = problems(clusters="west,zürich")
    assert sentence.endswith("since they are in certificates, got zürich")


@pytest.mark.parametrize(
    "missing",
    [["cluster"], ["clusters"], ["rendezvous"], ["cluster", "rendezvous"], ["cluster", "clusters", "rendezvous"]],
)
def test_what_is_missing_is_named_with_its_variable(missing: list[str]) -> None:
    (sentence,) = problems(**dict.fromkeys(missing))
    assert sentence.startswith(f"{', '.join(missing)} must be set")
    assert all(f"NEBULA_{name.upper()}" in sentence for name in missing)
    assert "nebula launch" in sentence


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("clusters", "west,,east", "separated by commas, got 'west,,east'"),
        ("clusters", "west,ea st", "must be names of 1 to 63 letters"),
        ("clusters", "west,east/../x", "must be names of 1 to 63 letters"),
        ("clusters", "west," + "e" * 64, "must be names of 1 to 63 letters"),
        ("clusters", "west,west", "must name each cluster once"),
        ("clusters", "north,south", r"cluster must be one of clusters \(north, south\), got 'west'"),
        ("clusters", ",".join(["west", *(f"c{i}" for i in range(64))]), "at most 64 clusters, got 65"),
        ("rendezvous", "nowhere", "rendezvous must be 'host:port'"),
        ("rendezvous", ":29400", "rendezvous must be 'host:port'"),
        ("rendezvous", "host:0", "a port from 1 to 65535"),
        ("rendezvous", "host:65536", "a port from 1 to 65535"),
        ("rendezvous", "host:port", "got 'host:port'"),
        ("rendezvous", "host:8²", "got 'host:8²'"),
        ("rendezvous", "tcp://host:29400", "rendezvous must be 'host:port' .*, got 'tcp://host:29400'"),
        ("rendezvous", " host:29400", "got ' host:29400'"),
        ("rendezvous", 29400, "rendezvous must be text, got 29400"),
        ("clusters", ["west", "east"], r"clusters must be text, got \['west', 'east'\]"),
        ("sync_codec", None, "sync_codec must be text, got None"),
        ("sync_codec", 8, "sync_codec must be text, got 8"),
        ("sync_final_codec", False, "sync_final_codec must be text, got False"),
        ("sync_error_feedback", "no", "sync_error_feedback must be true or false, got 'no'"),
        ("sync_keep_unsent", None, "sync_keep_unsent must be true or false, got None"),
        ("sync_staleness_limit", True, "sync_staleness_limit must be a number, got True"),
        ("sync_quorum", True, "sync_quorum must be a number, got True"),
        ("sync_timeout_s", False, "sync_timeout_s must be a number, got False"),
        ("sync_strategy", None, "sync_strategy must be 'every_step' or 'local_steps', got None"),
        ("sync_strategy", "sometimes", "sync_strategy must be 'every_step' or 'local_steps', got 'sometimes'"),
        ("sync_parameters", "some", "sync_parameters must be 'all' or 'trainable' or 'adapters', got 'some'"),
        ("sync_codec", "fp8", "sync_codec must be one of fp32, bf16, fp16, .*, got 'fp8'"),
        ("sync_codec", "bf16:3", "sync_codec must be bf16, got 'bf16:3': bf16 takes no options"),
        ("sync_feedback_decay", 1.5, "sync_feedback_decay must be between 0 and 1, got 1.5"),
        ("sync_every", "often", r"sync_every must be a number of steps \(30\), .*, got 'often'"),
        ("sync_every", 0, "1 <= first <= last, got 0"),
        ("sync_lora_merge", "sum", "sync_lora_merge must be 'mean' or 'product' or 'freeze_a', got 'sum'"),
        ("sync_backend", "gpu", "sync_backend must be 'auto' or 'host' or 'device', got 'gpu'"),
        ("sync_weight", "bytes", "sync_weight must be"),
        ("sync_on_loss", "panic", "sync_on_loss must be 'continue' or 'stop', got 'panic'"),
        ("sync_init", "zero", "sync_init must be"),
        ("sync_resume", "any", "sync_resume must be"),
        ("sync_data", "all", "sync_data must be"),
        ("sync_security", "ssl", "sync_security must be 'tls' or 'none', got 'ssl'"),
        ("sync_timeout_s", 0, "sync_timeout_s must be a positive number of seconds, .*, got 0"),
        ("sync_timeout_s", -1.5, "sync_timeout_s must be a positive number of seconds, .*, got -1.5"),
        ("sync_timeout_s", float("nan"), "got nan"),
        ("sync_timeout_s", float("inf"), "got inf"),
        ("sync_timeout_s", 86401, r"at most a day \(86400\), got 86401"),
        ("sync_timeout_s", "600", "got '600'"),
        ("sync_quorum", "1", "got '1'"),
        ("sync_quorum", 0, r"sync_quorum must be between 1 and the number of clusters \(2\), got 0"),
        ("sync_quorum", 3, "got 3"),
    ],
)
def test_each_problem_is_a_sentence(field: str, value: Any, sentence: str) -> None:
    (found,) = problems(**{field: value})
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(found)


UNSENT = {"sync_strategy": "local_steps", "sync_codec": "int8", "sync_keep_unsent": True}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"sync_strategy": "local_steps", "sync_outer": "sgd", "sync_outer_lr": 0},
            "sync_outer_lr must be a number from 1e-6 to 1e6, got 0",
        ),
        (
            {"sync_strategy": "local_steps", "sync_outer": "nesterov", "sync_outer_momentum": 1.0},
            "sync_outer_momentum must be 0, or from 1e-6 to 0.999999, got 1.0",
        ),
        (
            {"sync_strategy": "local_steps", "sync_outer_lr": 0.7},
            "sync_outer='average' takes neither learning rate nor momentum, got sync_outer_lr=0.7",
        ),
        ({"sync_strategy": "local_steps", "sync_fragments": 0}, "sync_fragments must be at least 1, got 0"),
        (
            {"sync_strategy": "local_steps", "sync_fragments": 7},
            "sync_fragments must divide a fixed sync_every, .*, got 7 and 30",
        ),
        (
            {"sync_strategy": "local_steps", "sync_codec": "dgc:0.01"},
            "sync_codec='dgc:0.01' accumulates gradients with a momentum of its own, so it needs sync_strategy='every_step'",
        ),
        *(
            (
                {"sync_strategy": "local_steps", "sync_outer": "sgd", "sync_outer_lr": lr},
                f"sync_outer_lr must be a number from 1e-6 to 1e6, got {lr!r}",
            )
            for lr in (1e-50, 2e6, float("nan"))
        ),
        (
            {"sync_strategy": "local_steps", "sync_outer": "sgd", "sync_outer_momentum": 0.99999999999},  # 1 in float32
            "sync_outer_momentum must be 0, or from 1e-6 to 0.999999, got 0.99999999999",
        ),
        *(
            (
                {"sync_strategy": "local_steps", "sync_codec": "topk:1/64", "sync_final_codec": final},
                f"sync_final_codec must send every element, as int8 and bf16 do, got '{final}'",
            )
            for final in ("topk:1/4", "randomk:0.01", "lowrank:1", "dgc:0.1")
        ),
        ({"sync_outer": "sgd"}, "sync_outer acts only with sync_strategy='local_steps', got 'sgd'"),
        ({"sync_fragments": 2}, "sync_fragments acts only with sync_strategy='local_steps', got 2"),
        (
            {"sync_keep_unsent": True, "sync_codec": "int8"},
            "sync_keep_unsent acts only with sync_strategy='local_steps', got True",
        ),
        (
            {"sync_final_codec": "bf16", "sync_codec": "int8"},
            "sync_final_codec acts only with sync_strategy='local_steps', got 'bf16'",
        ),
        (
            {"sync_codec": "int8", "sync_feedback_decay": 0.95, "sync_error_feedback": False},
            "sync_feedback_decay acts only with sync_error_feedback, .*, got 0.95",
        ),
        (
            {**UNSENT, "sync_error_feedback": False},
            "sync_keep_unsent acts only with sync_error_feedback, .*, got True",
        ),
        ({"sync_lora_merge": "product"}, "sync_lora_merge='product' acts only with sync_strategy='local_steps'"),
        (
            {"sync_strategy": "local_steps", "sync_lora_merge": "product", "sync_backend": "device"},
            "sync_lora_merge='product' needs sync_backend='auto' or 'host', since .*, got 'device'",
        ),
        (
            {"sync_strategy": "local_steps", "sync_outer": "nesterov"},
            "sync_outer='nesterov' needs sync_outer_momentum above 0",
        ),
        (
            {"sync_strategy": "local_steps", "sync_fragments": 2, "sync_every": "5..30"},
            "sync_fragments must divide a fixed sync_every, .*, got 2 and 5..30",
        ),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], sentence: str) -> None:
    (found,) = problems(**settings)
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(found)


def test_all_problems_at_once() -> None:
    found = problems(
        cluster="north", rendezvous="x", sync_codec="fp8", sync_quorum=9, sync_timeout_s=0, sync_weight="x"
    )
    assert len(found) == 6
    with pytest.raises(ConfigurationError, match="the configuration has 6 problems:\n  - cluster must be one of"):
        NebulaArguments(
            **{
                **GOOD,
                "cluster": "north",
                "rendezvous": "x",
                "sync_codec": "a",
                "sync_quorum": 9,
                "sync_timeout_s": 0,
                "sync_weight": "x",
            }
        )


@pytest.mark.parametrize("rendezvous", ["world", "loopback", "[::1]:29400", "door.example.org:1", "10.0.0.1:65535"])
def test_places_to_meet(rendezvous: str) -> None:
    assert NebulaArguments(**{**GOOD, "rendezvous": rendezvous}).rendezvous == rendezvous


def test_blanks_between_names_do_not_matter() -> None:
    assert NebulaArguments(**{**GOOD, "clusters": "west, east"}).cluster_names == ("west", "east")


def test_every_field_says_what_it_is() -> None:
    for field in dataclasses.fields(NebulaArguments):
        assert field.metadata["help"].endswith("."), field.name


def test_paddlenlps_own_parser_reads_it() -> None:
    from paddlenlp.trainer import PdArgumentParser

    words = (
        "--cluster east --clusters west,east --rendezvous world --sync_timeout_s 5 --sync_quorum 2 --sync_codec bf16 "
        "--sync_security none"
    )
    (arguments,) = PdArgumentParser(NebulaArguments).parse_args_into_dataclasses(words.split())
    assert arguments == NebulaArguments(
        "east", "west,east", "world", sync_timeout_s=5.0, sync_quorum=2, sync_codec="bf16", sync_security="none"
    )
