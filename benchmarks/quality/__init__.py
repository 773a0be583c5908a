"""What exchanging less costs in quality: a small language model, trained by clusters in one process.

    python -m benchmarks.quality search          # the runs listed in search.txt that have no row yet
    python -m benchmarks.quality confirm         # further seeds and 4 clusters for dense and the best found
    python -m benchmarks.quality run SETTING...  # one run, as in search.txt
    python -m benchmarks.quality table           # Markdown, from the rows so far
    python -m benchmarks.quality plot            # benchmarks/results/quality.png

Every finished run appends a row to benchmarks/results/quality.json at once, so each of these may be stopped at
any time and continues where it was; search.txt is read anew after each run. A process takes one core: with
--start scratch and --start continued two of them share the work, once the dense run is done.
"""
