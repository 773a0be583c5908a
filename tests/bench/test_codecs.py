"""`nebula bench codecs` and benchmarks/codecs.py: rows, bytes and targets; never how fast this machine is today."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from paddlenlp_nebula.bench import codec_peers, codec_rounds
from paddlenlp_nebula.bench.codec_peers import PIQUANT, TORCH
from paddlenlp_nebula.bench.codec_targets import targets
from paddlenlp_nebula.bench.codecs import SPECS, CodecPlan, measure_codecs
from paddlenlp_nebula.bench.contenders import WEIGHT, Contender, Own, matrices, slices
from paddlenlp_nebula.cli.main import main
from paddlenlp_nebula.codec.codec import Layout, Turn
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import CODECS, codec_from_spec
from paddlenlp_nebula.errors import ConfigurationError, NebulaError

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "codec",
    "error_feedback",
    "parameters",
    "bytes_per_parameter",
    "encode_gb_s",
    "decode_gb_s",
    "extra_memory_bytes",
    "memcpy_gb_s",
    "repetitions",
}
PEERS = {*PIQUANT.values(), *TORCH.values()}
BUCKET = 63 * 4096


def noise(numel: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(numel, dtype=np.float32)


def plan(*specs: str, parameters: int = 300_000, repetitions: int = 2) -> CodecPlan:
    return CodecPlan(specs, (parameters,), repetitions, least_s=0.0)


def rows_of(plan: CodecPlan) -> list[dict[str, Any]]:
    return [entry["row"] for entry in codec_rounds.measure(plan) if "row" in entry]


def without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(codec_peers, "import_module", missing)


# What is measured


def test_buckets_are_those_of_a_round() -> None:
    from paddlenlp_nebula.buckets import BUCKET_NUMEL

    assert BUCKET_NUMEL == BUCKET
    assert slices(2 * BUCKET + 5) == [Layout.flat(BUCKET), Layout.flat(BUCKET), Layout.flat(5)]
    assert matrices(2_003_007) == [Layout(((1000, 1000),))] * 2 + [Layout(((3, 1000), (7,)))]
    assert matrices(1_000_000) == [Layout(((1000, 1000),))]
    for numel in (1, 999, 1_000, 1_000_001):
        assert sum(layout.numel for layout in matrices(numel)) == numel
    assert Own("lowrank:2").layouts(1_000_000) == matrices(1_000_000)


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_of_the_codecs_payloads(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded here without the benchmark: error feedback as by default, the same windows of the same numbers."""
    without_peers(monkeypatch)
    numel, rounds = 300_000, 3
    source = np.random.default_rng(0).standard_normal(numel + 65536, dtype=np.float32)
    codec = codec_from_spec(spec)
    if not (codec.lossless or codec.own_feedback):
        codec = ErrorFeedback(codec)
    layouts = [Layout(((300, 1000),))] if spec == "lowrank:4" else [Layout.flat(BUCKET), Layout.flat(numel - BUCKET)]
    states = [codec.init(layout) for layout in layouts]
    nbytes = 0
    for number in range(1, rounds + 1):
        at = 1024 * number
        for part, layout in enumerate(layouts):
            vector = source[at : at + layout.numel]
            nbytes += codec.encode(vector, layout, states[part], Turn(number, part, 0)).nbytes
            at += layout.numel
    row = rows_of(plan(spec, parameters=numel, repetitions=rounds))[0]
    assert row.keys() == FIELDS
    assert row["codec"] == codec.spec
    assert row["error_feedback"] == (spec != "fp32")
    assert row["bytes_per_parameter"] == pytest.approx(nbytes / rounds / numel, rel=1e-12)
    assert row["repetitions"] == rounds
    assert all(row[key] > 0 for key in ("encode_gb_s", "decode_gb_s", "memcpy_gb_s"))


def test_extra_memory_is_state_payloads_sum_and_what_lies_between() -> None:
    numel = 4_000_000
    row = rows_of(plan("fp32", parameters=numel, repetitions=1))[0]
    assert 3.9 * numel <= row["extra_memory_bytes"] < 2 * 4 * numel  # the sum; payloads are views of the input
    row = rows_of(plan("sign", parameters=numel, repetitions=1))[0]
    assert 7.9 * numel <= row["extra_memory_bytes"] < 3 * 4 * numel  # and the residual


# Peers


def peers() -> list[Any]:
    kinds = [("piquant", name, feedback) for name in PIQUANT.values() for feedback in (False, True)]
    kinds += [("torch", name, True) for name in TORCH.values()]
    return [pytest.param(*kind, id=f"{kind[1]} {'with' if kind[2] else 'without'} feedback") for kind in kinds]


@pytest.mark.parametrize(("module", "name", "error_feedback"), peers())
def test_a_peer_decodes_what_it_encodes(module: str, name: str, error_feedback: bool) -> None:
    """With feedback, what comes out of many rounds and the last residual are what went in."""
    pytest.importorskip(module)
    specs = {peer: codec for codec, peer in (PIQUANT | TORCH).items()}
    peer = codec_peers.peer_of(specs[name], error_feedback=error_feedback)
    assert isinstance(peer, Contender)
    assert (peer.name, peer.error_feedback) == (name, error_feedback)
    numel = 10_000
    vector, out = noise(numel), np.zeros(numel, dtype=np.float32)
    peer.start([Layout.flat(numel)])
    for number in range(1, 5):
        payload = peer.encode(vector, 0, number)
        peer.add(payload, 0, out)
    if error_feedback:
        residual = np.asarray(peer._residuals[0])  # type: ignore[attr-defined]
        np.testing.assert_allclose(out / WEIGHT + residual, 4 * vector, atol=1e-4)
    else:
        bits = {"uint8": 8, "uint4": 4, "uint2": 2}[name.split()[1]]
        step = (vector.max() - vector.min()) / (2**bits - 1)
        assert np.abs(out / WEIGHT / 4 - vector).max() <= 1.01 * step
        assert peer.nbytes(payload) == numel * bits // 8 + 12


def test_torch_keeps_the_largest_of_each_chunk() -> None:
    pytest.importorskip("torch")
    peer = codec_peers.TorchTopK("torch topk 64/4096")
    numel = 2 * 4096 + 100
    vector, out = noise(numel), np.zeros(numel, dtype=np.float32)
    peer.start([Layout.flat(numel)])
    payload = peer.encode(vector, 0, 1)
    peer.add(payload, 0, out)
    for start, stop, kept in ((0, 4096, 64), (4096, 8192, 64), (8192, numel, 2)):
        chunk = vector[start:stop]
        largest = np.sort(np.argsort(np.abs(chunk))[-kept:])
        np.testing.assert_array_equal(np.flatnonzero(out[start:stop]), largest)
    assert peer.nbytes(payload) == (64 + 64 + 2) * (8 + 4)


def test_codecs_and_peers_are_measured_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake(Own):
        def __init__(self, name: str, error_feedback: bool) -> None:
            super().__init__("bf16", error_feedback=error_feedback)
            self.name = name

    def fake(codec: str, *, error_feedback: bool) -> Contender | None:
        name = (PIQUANT | TORCH).get(codec)
        return None if name is None else Fake(name, error_feedback)

    monkeypatch.setattr(codec_rounds, "peer_of", fake)
    rows = rows_of(plan("bf16", "int4"))
    assert [(row["codec"], row["error_feedback"]) for row in rows] == [
        ("bf16", True),
        ("int4", True),
        ("pypiquant uint4", True),
        ("int4", False),
        ("pypiquant uint4", False),
    ]
    assert len({row["memcpy_gb_s"] for row in rows[1:]}) == 1


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without_peers(monkeypatch)
    entries = list(codec_rounds.measure(plan("int8", "topk:64/4096,2bit", "sign", repetitions=1)))
    missing = [entry["not_measured"] for entry in entries if "not_measured" in entry]
    assert [entry["codec"] for entry in missing] == ["pypiquant uint8", "torch topk 64/4096"]
    assert all("No module named" in entry["why"] and "pip install pypiquant torch" in entry["why"] for entry in missing)
    rows = [entry["row"]["codec"] for entry in entries if "row" in entry]
    assert rows == ["int8", "int8", "topk:64/4096,2bit", "sign"]


# Targets


def row(codec: str, parameters: int = 1_000_000, error_feedback: bool = True, **values: float) -> dict[str, Any]:
    usual = {"bytes_per_parameter": 1.0, "encode_gb_s": 1.0, "decode_gb_s": 1.0, "extra_memory_bytes": 0}
    return {"codec": codec, "error_feedback": error_feedback, "parameters": parameters, **usual, **values}


def named(rows: list[dict[str, Any]], words: str) -> dict[str, Any]:
    (entry,) = (entry for entry in targets(rows) if words in entry["name"])
    assert entry.keys() == {"name", "value", "unit", "target", "met", "at"}
    return entry


@pytest.mark.parametrize(("codec", "limit"), [("int8", 1.05), ("int4", 0.55), ("topk:64/4096,2bit", 0.020)])
def test_bytes_count_at_the_worst_size(codec: str, limit: float) -> None:
    rows = [row(codec, bytes_per_parameter=limit), row(codec, 5, bytes_per_parameter=limit / 2)]
    entry = named(rows, f"bytes per parameter, {codec}")
    assert (entry["value"], entry["met"], entry["at"]) == (limit, True, "1000000 parameters")
    rows.append(row(codec, 7, bytes_per_parameter=1.001 * limit))
    entry = named(rows, f"bytes per parameter, {codec}")
    assert (entry["value"], entry["met"], entry["at"]) == (1.001 * limit, False, "7 parameters")


def test_speed_counts_against_the_peer_that_does_the_same() -> None:
    rows = [
        row("int8", encode_gb_s=1.0),
        row("int8", error_feedback=False, encode_gb_s=6.0, decode_gb_s=2.0),
        row("pypiquant uint8", encode_gb_s=2.0),
        row("pypiquant uint8", error_feedback=False, encode_gb_s=4.0, decode_gb_s=4.0),
        row("int8", 9, error_feedback=False, encode_gb_s=9.0),  # nothing to compare it with
    ]
    assert named(rows, "int8 encode, ")["value"] == 1.5
    assert named(rows, "int8 encode, ")["met"] is True
    assert named(rows, "int8 decode, ")["value"] == 0.5
    assert named(rows, "int8 decode, ")["met"] is False
    assert named(rows, "int8 encode with error feedback")["value"] == 0.5
    assert named(rows, "int8 encode with error feedback")["met"] is False


def test_topk_is_to_be_twice_as_fast_as_torch() -> None:
    rows = [row("topk:64/4096,2bit", encode_gb_s=1.9), row("torch topk 64/4096", decode_gb_s=4.0)]
    assert named(rows, "2bit encode with error feedback")["met"] is False
    assert named([row("topk:64/4096,2bit", encode_gb_s=2.0), rows[1]], "2bit encode")["met"] is True
    decode = named(rows, "2bit decode")
    assert (decode["value"], decode["target"], decode["met"]) == (0.25, "", None)


def test_memory_counts_without_peers_and_less_a_chunk() -> None:
    allowed = 3 * 4_000_000 + (1 << 20)
    rows = [row("int8", extra_memory_bytes=allowed), row("torch topk 64/4096", extra_memory_bytes=2 * allowed)]
    assert named(rows, "extra memory")["value"] == 3.0
    assert named(rows, "extra memory")["met"] is True
    rows.append(row("sign", extra_memory_bytes=allowed + 1))
    assert named(rows, "extra memory")["met"] is False
    assert named(rows, "extra memory")["at"] == "sign, 1000000 parameters"


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    for entry in targets([]):
        assert (entry["value"], entry["met"], entry["at"]) == (None, None, None)
    assert named([row("int8")], "int8 encode, ")["met"] is None


# The command and the script


def test_a_plan_travels_as_text() -> None:
    whole = plan("int8", "fp32")
    assert CodecPlan.parse(whole.text()) == whole


def test_an_unknown_codec_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        codec_from_spec("int9")
    monkeypatch.setattr(subprocess, "Popen", None)
    outcome = CliRunner().invoke(main, ["bench", "codecs", "fp32", "int9"])
    assert outcome.exit_code == 2
    assert outcome.output == f"Error: {refusal.value}\n"


def test_a_failing_process_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NebulaError, match="failed after 0 rows: no words"):
        measure_codecs(plan("fp32"))


def test_the_command_measures_in_a_process_without_the_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("piquant", "torch"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    file = tmp_path / "codecs.json"
    words = ["bench", "codecs", "bf16", "int8", "--parameters", "100000", "--parameters", "200000"]
    outcome = CliRunner().invoke(main, [*words, "--repetitions", "1", "--json", "--json-file", str(file)])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(file.read_text())
    assert json.loads(outcome.stdout) == result
    assert {"command", "date", "versions", "cpu", "cpu_count", "load_average", "targets"} <= result.keys()
    assert [(row["codec"], row["parameters"]) for row in result["rows"]] == [
        (codec, parameters) for parameters in (100_000, 200_000) for codec in ("bf16", "int8", "int8")
    ]
    assert all(row.keys() == FIELDS for row in result["rows"])
    assert result["not_measured"] == [{"codec": "pypiquant uint8", "why": "not here: pip install pypiquant torch"}]


def test_the_command_shows_rows_targets_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("int8", bytes_per_parameter=1.1, extra_memory_bytes=9_000_000, memcpy_gb_s=7.5, encode_gb_s=1.25)]

    def measured(plan: CodecPlan, when_known: Any) -> dict[str, Any]:
        assert plan == CodecPlan()
        for entry in rows:
            when_known(entry)
        missing = [{"codec": "pypiquant uint8", "why": "it is absent"}]
        return {"rows": rows, "not_measured": missing, "targets": targets(rows)}

    monkeypatch.setattr(import_module("paddlenlp_nebula.cli.bench"), "measure_codecs", measured)
    outcome = CliRunner().invoke(main, ["bench", "codecs"])
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.output.splitlines()
    assert lines[2].split() == ["int8", "yes", "1,000,000", "1.1000", "1.25", "1.00", "7.50", "2.25"]
    assert lines[3] == "pypiquant uint8: not measured, it is absent"
    assert lines[4] == "bytes per parameter, int8: 1.1 B <= 1.05 NOT MET"


@pytest.mark.timeout(300)
def test_the_script_writes_a_result(tmp_path: Path) -> None:
    output = tmp_path / "codecs.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "codecs.py"), "--tiny", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    check(json.loads(output.read_text()), {300_000})


def test_the_committed_result_has_all_rows() -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "codecs.json").read_text())
    check(committed, {1_000_000, 16_000_000, 100_000_000})
    assert committed["command"] == "python benchmarks/codecs.py"
    assert committed["not_measured"] == []
    assert all(entry["value"] is not None for entry in committed["targets"])


def test_the_page_states_the_committed_figures() -> None:
    """Its table at 16 million parameters, and its targets."""
    page = (ROOT / "docs" / "codecs.md").read_text()
    committed = json.loads((ROOT / "benchmarks" / "results" / "codecs.json").read_text())
    rows = {(row["codec"], row["error_feedback"]): row for row in committed["rows"] if row["parameters"] == 16_000_000}
    cells = [[cell.strip(" `") for cell in line.split(" | ")] for line in page.splitlines()]
    stated = {line[0].strip("| `"): line[1:5] for line in cells if len(line) == 6}
    for spec in SPECS:
        codec = codec_from_spec(spec)
        row, (grammar, nbytes, encode, decode) = rows[codec.spec, spec != "fp32"], stated[spec]
        assert grammar.replace("\\|", "|") == CODECS[spec.partition(":")[0]].grammar
        assert nbytes == f"{row['bytes_per_parameter']:.4g}"
        assert encode == ("no copy" if spec == "fp32" else f"{row['encode_gb_s']:.2f}")
        assert decode == f"{row['decode_gb_s']:.2f}"
    assert all(codec.grammar.replace("|", "\\|") in page for codec in CODECS.values())
    for entry in committed["targets"]:
        verdict = {True: "met", False: "**missed**", None: ""}[entry["met"]]
        value = f"{entry['value']:.4g} {entry['unit']}, {entry['at']}"
        assert f"| {entry['name']} | {value} | {entry['target']} | {verdict} |" in page


def check(result: dict[str, Any], sizes: set[int]) -> None:
    """Every codec at every size, every peer or the reason why not."""
    assert {"command", "date", "versions", "cpu", "cpu_count", "load_average"} <= result.keys()
    assert all(row.keys() == FIELDS for row in result["rows"])
    measured = {(row["codec"], row["parameters"]) for row in result["rows"]}
    specs = {codec_from_spec(spec).spec for spec in SPECS}
    assert {(spec, size) for spec in specs for size in sizes} <= measured
    assert {codec for codec, _ in measured if codec not in specs} | {
        entry["codec"] for entry in result["not_measured"]
    } == PEERS
    assert result["targets"] == targets(result["rows"])
    for words in ("bytes per parameter, int8", "bytes per parameter, int4", "bytes per parameter, topk"):
        assert named(result["rows"], words)["met"] is True
