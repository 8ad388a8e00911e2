"""Tables of offers: what is read, and what a person is told who wrote it wrongly."""

from pathlib import Path

import pytest

from swarmnode.scheduler.offers_csv import OffersError, parse_offers, read_offers

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "offers.csv"


def test_a_row_may_stand_for_many_equal_offers() -> None:
    rows = parse_offers(
        "# remark\nname,price_per_hour,groups_per_min,count\n\na,0.5,12,1\nb,0,3,2\n", "table"
    )
    assert [row.name for row in rows] == ["a", "b 1", "b 2"]
    assert rows[0].groups_per_s(1e9) == pytest.approx(0.2)


def test_speed_in_tokens_becomes_groups() -> None:
    (row,) = parse_offers("name,price_per_hour,tokens_per_s\na,1,4000\n", "table")
    assert row.groups_per_s(8000) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no lines"),
        ("name,price_per_hour,speed\n", "unknown column 'speed'"),
        ("name,tokens_per_s\n", "'price_per_hour' is missing"),
        ("name,price_per_hour\na,1\n", "groups_per_min and tokens_per_s"),
        ("name,price_per_hour,tokens_per_s\na,1\n", "table:2: 2 cells"),
        ("name,price_per_hour,tokens_per_s\na,one,5\n", "table:2: price_per_hour = 'one' is not a number"),
        ("name,price_per_hour,tokens_per_s\na,-1,5\n", "negative"),
        ("name,price_per_hour,tokens_per_s\na,nan,5\n", "negative"),
        ("name,price_per_hour,tokens_per_s\na,1,\n", "neither"),
        ("name,price_per_hour,tokens_per_s\n,1,5\n", "must not be empty"),
        ("name,price_per_hour,tokens_per_s,count\na,1,5,1.5\n", "count = 1.5"),
        ("name,price_per_hour,tokens_per_s,count\na,1,5,1000000000\n", "count"),
        ("name,price_per_hour,tokens_per_s,presence\na,1,5,2\n", "presence = 2 is not a probability"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(OffersError) as caught:
        parse_offers(text, "table")
    assert said in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffersError, match=r"nowhere\.csv"):
        read_offers(tmp_path / "nowhere.csv")


def test_the_documented_example_is_sound() -> None:
    rows = read_offers(EXAMPLE)
    assert len(rows) > 100
    assert len({row.name for row in rows}) == len(rows)
