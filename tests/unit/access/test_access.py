"""Access control: token files, their errors, and the principals of tokens and certificates."""

from __future__ import annotations

import hmac
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from genie.access import NO_ACCESS, PERMISSIONS, AccessControl, Principal

A, B = "a-token-of-the-tests", "another-token-of-the-tests"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def read(file: Path, text: str | bytes, *, certificates: bool = False) -> AccessControl:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(0o600)
    return AccessControl.load(None, str(file), certificates_required=certificates)


def test_without_settings_clients_need_not_authenticate() -> None:
    access = AccessControl.load(None, None)
    assert access.allows_anonymous
    assert not access.has_tokens
    assert access.by_token(A) is None


def test_certificates_alone_require_authentication() -> None:
    access = AccessControl.load(None, None, certificates_required=True)
    assert not access.allows_anonymous
    assert not access.has_tokens


def test_a_single_token_has_full_access(file: Path) -> None:
    for access in (AccessControl.load(A, None), read(file, A), read(file, f"  {A}\r\n")):
        principal = access.by_token(A)
        assert principal == Principal("default", None, frozenset(PERMISSIONS))
        assert access.by_token(B) is None
        assert access.by_token(A[:-1]) is None
        assert access.by_name("default") is principal
        assert access.has_tokens
        assert not access.allows_anonymous


def test_a_section_for_each_principal(file: Path) -> None:
    access = read(
        file,
        f"""
        [payments]
        token = "{A}"
        prefixes = ["accounts/", "limits/"]
        may = ["lock"]
        ["the look out"]
        token = "{B}"
        """,
    )
    payments, look_out = access.by_token(A), access.by_token(B)
    assert payments == Principal("payments", ("accounts/", "limits/"), frozenset({"lock"}))
    assert look_out == Principal("the look out", None, frozenset({"lock", "inspect"}))
    assert payments is not None
    assert [payments.may_access(name) for name in ("accounts/2", "accounts", "limits/", "x/accounts/")] == [
        True,
        False,
        True,
        False,
    ]
    assert payments.has_permission("lock")
    assert not payments.has_permission("inspect")
    assert payments.scope_description == "names that begin with 'accounts/', 'limits/'"
    assert access.by_name("payments") == payments
    assert access.by_name("nobody") is None


def test_an_admin_has_all_permissions_and_its_prefixes_limit_its_locks() -> None:
    admin = Principal("ops", ("ops/",), frozenset({"admin"}))
    assert all(admin.has_permission(right) for right in PERMISSIONS)
    assert not admin.may_access("accounts/2")
    assert admin.may_see("accounts/2")
    assert admin.sees_all
    assert not Principal("payments", ("ops/",)).sees_all
    assert not Principal("payments", ("ops/",)).may_see("accounts/2")


def test_a_certificate_without_a_section_has_the_default_permissions(file: Path) -> None:
    access = read(file, f'[ops]\nmay = ["admin"]\n[payments]\ntoken = "{A}"\n', certificates=True)
    assert access.by_certificate("ops") == Principal("ops", None, frozenset({"admin"}))
    assert access.by_certificate("payments") is None, "that name is proved by its token"
    assert access.by_certificate("stranger") == Principal("stranger", None, frozenset({"lock", "inspect"}))
    assert access.by_name("ops") is None, "that name is proved by no token"


def test_no_certificate_replaces_the_single_token(file: Path) -> None:
    for access in (read(file, A, certificates=True), AccessControl.load(A, None, certificates_required=True)):
        assert access.by_token(A) is not None
        assert access.by_certificate("default") is None


def test_errors_do_not_contain_a_misplaced_token(file: Path) -> None:
    for text in (f'{A} = "x"', f"[a]\n{A} = 1", f"[a]\n[{A}]\n[{A}]", f"token={A}"):
        with pytest.raises(ValueError, match="GENIE_TOKEN_FILE: ") as caught:
            read(file, text)
        assert A not in str(caught.value)


def test_all_tokens_are_compared_in_constant_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = read(file, f'[a]\ntoken = "{A}"\n[b]\ntoken = "{B}"\n')
    compared: list[int] = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for said in (A, B, "", "x" * 10_000, "\udcff"):
        compared.clear()
        access.by_token(said)
        assert compared == [32, 32]


LONG = "t" * 1025


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty; it must contain one token, or TOML"),
        (" \n\t\n", "the file is empty"),
        (b"\xff\xfe" * 10, "must be text in UTF-8"),
        ("short", "the token must have 16 to 1024 characters, and has 5"),
        (LONG, "the token must have 16 to 1024 characters, and has 1025"),
        ("two words-and-more", "the file is neither one token nor TOML"),
        (f"{A[:8]}\0{A[8:]}", "the token must not contain control characters"),
        ("# empty\n", "the file has no principals; it must have a section for each, like [payments]"),
        (f'token = "{A}"', "token is outside of a section"),
        ("[payments]", "[payments] token is missing; it is optional only if clients present certificates"),
        ("[payments]\ntoken = 5", "[payments] token must be a string of 16 to 1024 characters"),
        ('[payments]\ntoken = "short"', "[payments] token must have 16 to 1024 characters, and has 5"),
        (f'[payments]\ntoken = "{LONG}"', "[payments] token must have 16 to 1024 characters, and has 1025"),
        (f'[payments]\ntoken = "{A}\\n"', "[payments] token must not contain control characters"),
        (f'[payments]\ntoken = "{A}"\nuser = "x"', "[payments] user is not known; a section has token, prefixes, may"),
        (f'[payments.eu]\ntoken = "{A}"', "[payments] eu is not known"),
        (
            f'[payments]\ntoken = "{A}"\nmay = ["read"]',
            "[payments] 'may' contains 'read', which is not a permission: use",
        ),
        (
            f'[payments]\ntoken = "{A}"\nmay = "lock"',
            '[payments] \'may\' must be a non-empty list of permissions: "lock", "inspect"',
        ),
        (f'[payments]\ntoken = "{A}"\nmay = []', "[payments] 'may' must be a non-empty list"),
        (f'[payments]\ntoken = "{A}"\nmay = [1]', "[payments] 'may' must be a non-empty list"),
        (f'[payments]\ntoken = "{A}"\nprefixes = "a/"', "[payments] prefixes must be a list of strings"),
        (f'[payments]\ntoken = "{A}"\nprefixes = []', "omit it to allow every resource"),
        (f'[payments]\ntoken = "{A}"\nprefixes = [""]', "omit it to allow every resource"),
        (f'[payments]\ntoken = "{A}"\nprefixes = ["{"p" * 513}"]', "[payments] prefixes must have at most 512"),
        (f'[a]\ntoken = "{A}"\n[b]\ntoken = "{A}"', "[b] has the same token as [a]; each must have its own"),
        (f'["{"n" * 129}"]\ntoken = "{A}"', "the name of a section must have 1 to 128 characters"),
        (f'[""]\ntoken = "{A}"', "the name of a section must have 1 to 128 characters"),
        (f'["a\\u0000b"]\ntoken = "{A}"', "and no control characters"),
        ("#" * ((1 << 20) + 1), "must have at most 1048576 bytes"),
    ],
)
def test_errors_of_a_token_file_are_explained_without_its_tokens(file: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match="GENIE_TOKEN_FILE: ") as caught:
        read(file, text)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert A not in str(caught.value)
    assert LONG not in str(caught.value)


def test_a_missing_file_and_a_folder(file: Path) -> None:
    for path in (file, file.parent):
        with pytest.raises(ValueError, match="can't be read: "):
            AccessControl.load(None, str(path))


def test_token_and_token_file_exclude_each_other(file: Path) -> None:
    file.write_text(B)
    with pytest.raises(ValueError, match="GENIE_TOKEN and GENIE_TOKEN_FILE are mutually exclusive: set only one"):
        AccessControl.load(A, str(file))


@pytest.mark.parametrize("token", ["", "short", LONG, A + "\n"])
def test_a_token_in_a_variable_is_checked_like_one_in_a_file(token: str) -> None:
    with pytest.raises(ValueError, match="GENIE_TOKEN must ") as caught:
        AccessControl.load(token, None)
    assert not token or token not in str(caught.value)


def test_a_world_readable_file_is_detected(file: Path) -> None:
    read(file, A)
    for mode, seen in ((0o600, False), (0o640, False), (0o644, True)):
        file.chmod(mode)
        assert AccessControl.load(None, str(file)).file_world_readable is seen


def test_long_lists_of_prefixes_are_abbreviated() -> None:
    assert Principal("a", tuple(f"{n}/" for n in range(12))).scope_description.endswith("'9/' or 2 more")


def test_a_file_that_is_cut_off_never_has_a_part_of_a_token(file: Path) -> None:
    text = f'[a]\ntoken = "{A}"\nprefixes = ["a/"]\n[b]\ntoken = \'{B}\'\nmay = ["inspect"]\n'
    accepted = 0
    for end in range(len(text)):
        try:
            access = read(file, text[:end])
        except ValueError:
            continue
        accepted += 1
        parts = [token[:length] for token in (A, B) for length in range(16, len(token))]
        assert not any(access.by_token(part) for part in parts)
        assert access.by_token(A) == access.by_name("a")
        assert access.by_token(B) == access.by_name("b")
    assert accepted, "a file that is cut off between two lines is valid"


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "{a = " * 100_000], ids=["arrays", "tables"])
def test_a_file_with_deeply_nested_values_is_invalid(file: Path, text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        read(file, text)


class CountedText(str):
    """A name that counts its comparisons with prefixes."""

    __slots__ = ()
    compared = 0

    def startswith(self, prefixes: Any, *arguments: Any) -> bool:
        CountedText.compared += len(prefixes) if isinstance(prefixes, tuple) else 1
        return super().startswith(prefixes, *arguments)

    def __lt__(self, other: str) -> bool:
        CountedText.compared += 1
        return super().__lt__(other)

    def __gt__(self, other: str) -> bool:
        CountedText.compared += 1
        return super().__gt__(other)


def test_a_name_is_compared_with_few_of_very_many_prefixes() -> None:
    principal = Principal("p", tuple(f"{number:05}/" for number in range(10_000)))
    names = [CountedText(f"{number:05}/x") for number in range(0, 10_000, 100)]
    CountedText.compared = 0
    assert principal.first_forbidden(names) is None
    assert principal.first_forbidden([*names, CountedText("10000/x")]) == "10000/x"
    assert CountedText.compared < 201 * 20


def test_many_prefixes_allow_the_same_names_as_each_of_them() -> None:
    """Prefixes of prefixes are among them."""
    chance = random.Random(3)  # noqa: S311
    texts = ["".join(text) for size in range(6) for text in itertools.product("abc", repeat=size)]
    for _ in range(100):
        prefixes = tuple(chance.sample(texts[4:], chance.choice([1, 16, 17, 60])))
        principal = Principal("p", prefixes)
        for name in texts:
            assert principal.may_access(name) is name.startswith(prefixes)
            assert principal.may_see(name) is name.startswith(prefixes)


def test_a_subtree_is_locked_by_a_prefix_of_all_its_names_and_seen_with_each_of_them() -> None:
    for more in ((), tuple(f"{number:02}/" for number in range(40))):  # few prefixes are compared one by one
        principal = Principal("p", ("accounts/", "limits/*", "limits/**", "stock/1/", *more))
        for subtree, may_lock, may_see in (
            ("accounts/**", True, True),
            ("accounts/2/**", True, True),
            ("limits/**", False, True),
            ("stock/**", False, True),
            ("stock/1/**", True, True),
            ("stock/2/**", False, False),
            ("**", False, True),
            ("a/**", False, False),
            ("zz/**", False, False),
        ):
            assert principal.may_access(subtree) is may_lock, subtree
            assert principal.may_see(subtree) is may_see, subtree
            assert principal.may_see_context(subtree) is may_lock, "notes of requests below it are for other names, too"
            assert not NO_ACCESS.may_see(subtree)
            assert not NO_ACCESS.may_see_context(subtree)
        assert principal.may_see_all("limits/*")
        assert not principal.may_see_all("limits/")
