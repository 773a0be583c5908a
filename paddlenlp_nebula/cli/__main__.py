"""``python -m paddlenlp_nebula.cli``: the ``nebula`` command where its script is not on PATH."""

from paddlenlp_nebula.cli.main import main

main(prog_name="nebula")
