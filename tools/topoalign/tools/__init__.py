"""Commands that no service needs: published case files, benchmarks, and documents generated from the code."""
