"""A table of offers as a CSV file: what people edit, and what `swarmnode plan` reads.

Lines that begin with # are remarks. The first other line names the columns; unknown ones are errors. `count`
stands for that many equal offers.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path


class OffersError(ValueError):
    """The file cannot be used; the message is one line that says where and what to do."""


@dataclass(frozen=True)
class OfferRow:
    """One machine, as offered. Either `groups_per_min` or `tokens_per_s` says how fast it is."""

    name: str
    price_per_hour: float
    owner: str = ""
    region: str = ""
    device: str = ""
    memory_gb: float = math.inf
    groups_per_min: float | None = None
    tokens_per_s: float | None = None
    groups_in_hand: float = 8.0
    """Groups that it generates at once: with its rate, this says how long one takes."""
    upload_mbps: float = 1000.0
    download_mbps: float = 1000.0
    round_trip_ms: float = 50.0
    presence: float = 0.99
    departures_per_hour: float = 0.02
    available_for_h: float = math.inf

    def groups_per_s(self, tokens_per_group: float) -> float:
        """Its rate, by tokens if it is not given in groups."""
        if self.groups_per_min is not None:
            return self.groups_per_min / 60
        return (self.tokens_per_s or 0.0) / tokens_per_group


_TEXT = {"name", "owner", "region", "device"}
COLUMNS = (*OfferRow.__dataclass_fields__, "count")
MAX_ROWS = 100_000


def read_offers(path: Path) -> list[OfferRow]:
    """The offers of a file. Raises `OffersError`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OffersError(f"{path}: cannot be read ({error})") from error
    return parse_offers(text, str(path))


def parse_offers(text: str, where: str) -> list[OfferRow]:
    """The offers of a table; `where` names it in errors. Raises `OffersError`."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if _counts(line)]
    if not lines:
        raise OffersError(
            f"{where}: no lines; the first names the columns, for example name,price_per_hour,tokens_per_s"
        )
    header = [cell.strip() for cell in next(csv.reader([lines[0][1]]))]
    unknown = [name for name in header if name not in COLUMNS]
    if unknown:
        raise OffersError(f"{where}: unknown column {unknown[0]!r}; known: {', '.join(COLUMNS)}")
    missing = [name for name in ("name", "price_per_hour") if name not in header]
    if missing:
        raise OffersError(f"{where}: the column {missing[0]!r} is missing")
    if not {"groups_per_min", "tokens_per_s"} & set(header):
        raise OffersError(
            f"{where}: one of the columns groups_per_min and tokens_per_s must say how fast a worker is"
        )
    rows: list[OfferRow] = []
    for number, line in lines[1:]:
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if len(cells) != len(header):
            raise OffersError(f"{where}:{number}: {len(cells)} cells, {len(header)} columns are named")
        rows += _rows(dict(zip(header, cells, strict=True)), f"{where}:{number}")
        if len(rows) > MAX_ROWS:
            raise OffersError(f"{where}: more than {MAX_ROWS:,} offers")
    return rows


def _counts(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _rows(cells: dict[str, str], where: str) -> list[OfferRow]:
    values: dict[str, str | float] = {}
    for column, cell in cells.items():
        if column in _TEXT:
            values[column] = cell
        elif cell:
            values[column] = _number(cell, f"{where}: {column}")
    if not values.get("name") or "price_per_hour" not in values:
        raise OffersError(f"{where}: name and price_per_hour must not be empty")
    count = float(values.pop("count", 1.0))
    if count != int(count) or not 1 <= count <= MAX_ROWS:
        raise OffersError(f"{where}: count = {count:g} is not a whole number from 1 to {MAX_ROWS:,}")
    if not 0 <= float(values.get("presence", 1.0)) <= 1:
        raise OffersError(f"{where}: presence = {values['presence']:g} is not a probability")
    row = OfferRow(**values)  # type: ignore[arg-type]
    if row.groups_per_min is None and row.tokens_per_s is None:
        raise OffersError(f"{where}: neither groups_per_min nor tokens_per_s is given")
    if count == 1:
        return [row]
    return [OfferRow(**(values | {"name": f"{row.name} {one}"})) for one in range(1, int(count) + 1)]  # type: ignore[arg-type]


def _number(cell: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError as error:
        raise OffersError(f"{where} = {cell!r} is not a number") from error
    if not value >= 0:
        raise OffersError(f"{where} = {cell} is negative")
    return value
