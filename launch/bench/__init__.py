"""The benchmarks behind `burst-rt bench`."""
