"""`topoalign bench`: each benchmark is a module here whose `cases()` measures its cases one after the other."""

import pkgutil
import signal
from collections.abc import Callable, Iterator
from importlib import import_module

import click

from topoalign.cli import output
from topoalign.tools.progress import show_progress

Cases = Callable[[], Iterator[dict[str, object]]]


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help='Print {"name", "cases"} per benchmark.')
def bench(names: tuple[str, ...], as_json: bool) -> None:
    """
    Measure the calls for which a pod waits: p50 and p99 in milliseconds, and n, for each case. Without NAME: all.

    \b
    Examples:
      topoalign bench admit
      topoalign bench --json
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what it has started is ended, too
    known = benchmarks()
    for name in names:
        if name not in known:
            raise click.UsageError(f"no benchmark {name!r}: there are {', '.join(known)}")
    for name in names or known:
        cases: Cases = import_module(f"{__name__}.{known[name]}").cases
        rows = list(show_progress(cases(), name))
        if as_json:
            output.print_json_line({"name": name, "cases": rows})
        else:
            show(name, rows)


def benchmarks() -> dict[str, str]:
    """Name of each benchmark -> its module in this package."""
    return {module.name.replace("_", "-"): module.name for module in pkgutil.iter_modules(__path__)}


def show(name: str, rows: list[dict[str, object]]) -> None:
    """Print the rows of a benchmark as a table; a column for each key of any row."""
    titles = list(dict.fromkeys(key for row in rows for key in row))
    output.print_line(output.heading(name))
    output.columns(titles, [[cell(row.get(title, "-")) for title in titles] for row in rows])
    output.print_line()


def cell(value: object) -> str:
    """A value as text: fractions with three decimals."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
