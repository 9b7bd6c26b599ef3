"""One recorded batch through the loss code of TRL, Liger, verl and torchtitan, and through fastrl.

    python -m benchmarks.frameworks

writes benchmarks/results/frameworks.json, from which `python -m benchmarks.table` makes the tables
of docs/losses.md. A framework that is not installed is named as not run; with

    bash tests/peers/install DIR && PYTHONPATH=DIR python -m benchmarks.frameworks

verl and torchtitan are there too. tests/test_frameworks.py holds every row whose framework is.
"""
