"""
How a journal is written, and what can be trusted of one that is damaged.

A header, and then one line per entry. A line is the CRC-32 of its JSON, a blank, and the JSON. A line without an end is an
append that was cut short and never answered, so it is dropped; anything else that is not as it was written is damage.

The state is what follows from the newest snapshot on. So damage before that costs no more than facts which the bus has not
received, and the snapshot stands in for them; damage after it, or in the header, means that something may have been given of
which nothing is known here, and leaves the record unconfirmed. Of what is whole, the lines around the newest snapshot are
trusted as far as they follow one another; nothing of a journal of another node, or of a later version of this format.

Fields may be added to the format and to events, never renamed: readers pass over those that they do not know. A fact of a
kind that is not known may have changed what is held, and counts as damage where it stands.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar
from zlib import crc32

import msgspec

from topoalign.core.model.errors import Undecodable, clean, quoted
from topoalign.core.model.events import AllocationsSnapshot, LedgerEvent
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import JournalEntry

VERSION = 1

Place = tuple[int, int]
"""Epoch and seq of a fact."""


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="topoalign.journal"):
    """The first line: whose journal this is, and how it is written."""

    version: int
    node: NodeName
    doubt: str = ""
    """Why entries may be missing; empty: none is."""


class Line(NamedTuple):
    """One line that is whole."""

    entry: JournalEntry
    encoded: bytes
    """As it is on disk."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What `read` finds in a journal."""

    lines: Sequence[Line] = ()
    """What can be trusted: all, or lines with a snapshot among them, or none."""
    unfinished: int = 0
    """Bytes of a last line that was never finished."""
    damage: str | None = None
    """What is not as it was written."""
    unconfirmed: str | None = None
    """Why the record is unconfirmed: something may have been given that is not in `lines`. None: it is confirmed."""


T = TypeVar("T")

_headers = msgspec.json.Decoder(Header)
_entries = msgspec.json.Decoder(JournalEntry)


def encoded(record: JournalEntry | Header) -> bytes:
    """The line for a header or an entry: CRC-32 in hexadecimal, a blank, JSON, a line feed."""
    payload = msgspec.json.encode(record)
    return b"%08x %s\n" % (crc32(payload), payload)


def read(content: bytes, node: NodeName, published: Place | None) -> Record:
    """
    Reads the bytes of a journal of this node: what can be trusted of it, and what is damaged. Never raises.

    `published`: the newest fact that the bus has; None: not known. A journal that ends before it has lost facts.
    """
    whole, _, unfinished = content.rpartition(b"\n")
    if not whole:
        return lost("it has no header" if content else "it is empty")
    first, *others = whole.split(b"\n")
    damages: list[str] = []
    try:
        header = decoded("the header", first, _headers)
    except Undecodable as error:
        damages.append(error.finding)
        header = Header(version=VERSION, node=node, doubt=error.finding)
    if header.version > VERSION:
        return lost(f"it is of version {header.version}, and this program reads up to version {VERSION}")
    if header.node != node:
        return lost(f"it is the journal of node {quoted([header.node])}, and this is node {quoted([node])}")
    runs, found = runs_of(others, node)
    damages += found
    if unfinished and is_whole(unfinished[:-1]):
        damages.append("the last line has lost its end")
        runs.append([])
    if not header.doubt:
        damages += ending(runs[-1], published)
    if not damages:
        return Record(lines=runs[-1], unfinished=len(unfinished), unconfirmed=header.doubt or None)
    damage = damages[0] if len(damages) == 1 else f"{damages[0]}, and {len(damages) - 1} more"
    trusted = next((run for run in reversed(runs) if has_snapshot(run)), [])
    is_all = trusted is runs[-1] and has_snapshot(trusted) and not ending(trusted, published)
    return Record(lines=trusted, damage=damage, unconfirmed=header.doubt or (None if is_all else damage))


def lost(damage: str) -> Record:
    """The record of a journal of which nothing can be trusted, for this reason."""
    return Record(damage=damage, unconfirmed=damage)


def runs_of(lines: Sequence[bytes], node: NodeName) -> tuple[list[list[Line]], list[str]]:
    """The lines that are whole, as one list for each run without a gap or damage; and what is wrong between the runs."""
    runs: list[list[Line]] = [[]]
    damages: list[str] = []
    for number, line in enumerate(lines, 2):
        try:
            entry = entry_of(number, line, node)
        except Undecodable as error:
            damages.append(error.finding)
            runs.append([])
            continue
        if not all(follows(*pair) for pair in pairwise([*facts(runs[-1][-1:]), *entry.events])):
            damages.append(f"facts before line {number} are missing")
            runs.append([])
        runs[-1].append(Line(entry, line + b"\n"))
    return runs, damages


def ending(run: Sequence[Line], published: Place | None) -> list[str]:
    """What is missing at the end of a journal whose last run is this; empty: nothing, as far as can be told."""
    said = facts(run)
    if said and not has_snapshot(run) and said[0].seq != 1:
        return ["the snapshot at its end is missing"]
    if published is not None and published > (place(said[-1]) if said else (0, 0)):
        return ["facts at its end are missing, which were published"]
    return []


def entry_of(number: int, line: bytes, node: NodeName) -> JournalEntry:
    """Decodes line `number` (from 1). Raises Undecodable, also for facts of another node."""
    entry = decoded(f"line {number}", line, _entries)
    for event in entry.events:
        if event.node != node:
            raise Undecodable(f"line {number}", f"it is about node {quoted([event.node])}")
    return entry


def decoded(what: str, line: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Checks a line against its checksum and decodes its JSON. `what` names it in the error. Raises Undecodable."""
    if not is_whole(line):
        raise Undecodable(what, "it does not match its checksum")
    try:
        return decoder.decode(line.partition(b" ")[2])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(what, clean(str(error), 200)) from error


def is_whole(line: bytes) -> bool:
    """Whether a line (without its line feed) matches its checksum."""
    checksum, _, payload = line.partition(b" ")
    return checksum == b"%08x" % crc32(payload)


def facts(lines: Sequence[Line]) -> list[LedgerEvent]:
    """The facts of all these lines, in order."""
    return [event for line in lines for event in line.entry.events]


def has_snapshot(lines: Sequence[Line]) -> bool:
    """Whether a snapshot of all allocations is among the facts of these lines."""
    return any(isinstance(event, AllocationsSnapshot) for event in facts(lines))


def follows(before: LedgerEvent, event: LedgerEvent) -> bool:
    """Whether no fact is missing between these two: seq counts up by one, and an epoch begins with a snapshot."""
    if event.epoch == before.epoch:
        return event.seq == before.seq + 1
    return event.epoch > before.epoch and isinstance(event, AllocationsSnapshot)


def place(event: LedgerEvent) -> Place:
    """Epoch and seq of a fact; greater for a later one."""
    return event.epoch, event.seq


def unpublished(
    events: Sequence[tuple[LedgerEvent, float]], published: tuple[int, int] | None, newest: int
) -> Sequence[tuple[LedgerEvent, float]]:
    """
    The facts, with their times, that the bus does not have: all after the newest published one; all, if the journal has
    that one no longer. `newest` is the index of the newest snapshot.

    Where it is not known what the bus has received, the newest snapshot stands for everything before it: to say old facts
    again, after newer ones, would be worse than to leave some of them out.
    """
    if published is None:
        return events[newest:]
    positions = [at for at, (event, _) in enumerate(events) if (event.epoch, event.seq) == published]
    return events[positions[0] + 1 :] if positions else events
