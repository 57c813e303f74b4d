"""A rearrangement moves no request without need."""

from __future__ import annotations

from support.core.driver import Driver


def test_a_shared_request_stays_when_its_owners_exclusive_one_overtakes() -> None:
    driver = Driver()
    driver.request("A", "shared:B", transaction="T")
    for _ in range(3):
        driver.request("shared:A")
    driver.request("shared:B")
    driver.request("shared:A", "B", transaction="T")  # waits for the other sharer of B
    assert driver.request("A", transaction="T")[-1] == ("locked", 7)
    driver.request("D")
    assert driver.request("A", "D", transaction="T") == [("queued", 9)]  # overtakes the sharers, and waits for D
    assert driver.queue("A") == [9, 2, 3, 4, 6]
