"""Benchmarks: ratios against a peer or a limit, measured in one run, in alternating rounds, by medians."""
