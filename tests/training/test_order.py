"""Items in random order: passes, seeds and positions."""

from fastrl.training.order import ShuffledItems, seeded


def test_each_pass_has_every_item_once_in_an_order_of_its_own() -> None:
    items = ShuffledItems(range(10), "seed")
    first, second = items.take(10), items.take(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != list(range(10))


def test_a_position_goes_on_as_if_nothing_had_been() -> None:
    whole = ShuffledItems(range(7), 1).take(30)
    items = ShuffledItems(range(7), 1)
    assert [x for number in (3, 6, 1, 20) for x in items.take(number)] == whole
    resumed = ShuffledItems(range(7), 1)
    resumed.position = 9
    assert resumed.take(21) == whole[9:]


def test_the_seed_gives_the_order() -> None:
    orders = {tuple(ShuffledItems(range(10), seed).take(10)) for seed in range(5)}
    assert len(orders) == 5


def test_a_purpose_has_its_own_numbers() -> None:
    numbers = [seeded(*parts).getrandbits(63) for parts in ((1, "a"), (1, "a"), (1, "b"), (2, "a"))]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3
