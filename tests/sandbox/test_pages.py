"""Every sentence and table row of the sandbox pages, and what proves it: a test, an attack, a check
of the conformance suite. A sentence that is new or changed fails here until it has its proof."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks.base import ATTACKS
from attacks.cases import ATTACKS as ALL_ATTACKS

from ramify.sandbox.conformance import CHECKS

assert ALL_ATTACKS is ATTACKS
TESTS = Path(__file__).resolve().parents[1]
DOCS = TESTS.parent / "docs"
NO_PROMISE = "advice or definition"

SANDBOX = {
    "The model writes Python": NO_PROMISE,
    "`SandboxSpec(provider=…)` chooses": NO_PROMISE,
    "The default is `jail`": "sandbox/test_default.py::test_a_weakness_is_passed_over_only_if_it_was_named",
    "If the jail is not available": "sandbox/test_default.py::test_what_cannot_be_had_is_refused",
    "**Linux without a jail**": "sandbox/test_jail.py::test_a_weaker_tier_than_asked_for_is_refused_with_the_way_to_get_it",
    "`allow_weaker=True` (`--allow-weaker`) takes": "sandbox/test_default.py::test_what_is_accepted_is_said_aloud",
    "**macOS, Windows**": "sandbox/test_jail.py::test_another_platform_is_refused_unless_weaker_is_accepted",
    "`allow_weaker=True` takes `process`": "sandbox/test_jail.py::test_another_platform_is_refused_unless_weaker_is_accepted",
    "A `WeakSandboxWarning` reports": "sandbox/test_default.py::test_what_is_accepted_is_said_aloud",
    "To confirm that you know": "sandbox/test_default.py::test_a_weakness_is_passed_over_only_if_it_was_named",
    "| provider |": NO_PROMISE,
    "| `jail` |": "sandbox/test_promises.py::test_promise",
    "| `process` |": "sandbox/test_promises.py::test_promise",
    "| `inprocess` |": "sandbox/test_promises.py::test_promise",
    "| `ipython` |": "sandbox/test_ipython.py::test_promise",
    "| `docker` |": "sandbox/test_docker.py::test_promise",
    "| `modal`": "sandbox/test_cloud.py::test_promise",
    "| `prime` |": "sandbox/test_cloud.py::test_promise",
    "| `monty` |": "sandbox/test_monty.py::test_walls",
    "`ramify doctor` says": "sandbox/test_default.py::test_doctor",
    "`python -m ramify.testing sandbox": "sandbox/test_promises.py::test_promise",
    "To add a provider": "cli/test_plugins.py",
    "`Session.run` returns": "test_public.py",
    '`SandboxSpec(provider="my.module")`': "cli/test_plugins.py",
    "Docker and the clouds have been tested": NO_PROMISE,
    "The clouds' doubles and calls": "sandbox/test_cloud.py::test_the_doubles_have_the_sdk_s_own_face",
    "An SDK that lacks a call": "sandbox/test_cloud_deletes.py::test_an_sdk_that_does_not_fit_is_refused_before_anything_is_created",
    "A box is deleted however": "sandbox/test_cloud_deletes.py::test_a_step_that_fails_leaves_no_box",
    "Every value that code sends": "sandbox/test_bounds.py::test_json_is_counted_as_it_is",
    "A cell that sends more than the limit": "sandbox/test_bounds.py::test_the_cell_gets_an_exception_and_its_session_goes_on",
    "A session that sends more by bypassing": "sandbox/test_bounds.py::test_what_a_lying_guest_sends_is_refused_with_its_limit",
    "Its call gets a new one": "engine/test_deaths.py::test_variables_are_back_and_nothing_was_asked_twice",
    "| in one call or answer |": NO_PROMISE,
    "| bytes |": "sandbox/test_bounds.py::test_the_cell_gets_an_exception_and_its_session_goes_on",
    "| items of all lists and dicts |": "sandbox/test_bounds.py::test_the_cell_gets_an_exception_and_its_session_goes_on",
    "| lists and dicts;": "sandbox/test_bounds.py::test_the_cell_gets_an_exception_and_its_session_goes_on",
    "| keys of all dicts": "sandbox/test_bounds.py::test_the_cell_gets_an_exception_and_its_session_goes_on",
    "| strings above": "sandbox/test_bounds.py::test_the_cell_gets_an_exception_and_its_session_goes_on",
    "| nesting": "sandbox/test_bounds.py::test_a_value_may_be_nested_as_deep_as_the_page_says",
    "| digits": "sandbox/test_bounds.py::test_the_cell_gets_an_exception_and_its_session_goes_on",
    "| keys of a set": "sandbox/test_bounds.py::test_the_cell_gets_an_exception_and_its_session_goes_on",
    "| prompts": "engine/test_hostile_values.py",
    "A value whose JSON is longer": "sandbox/test_loop.py::test_no_frame_keeps_the_loop",
    "Smaller ones are decoded at once": "sandbox/test_loop.py::test_no_frame_keeps_the_loop",
    "So whatever a session sends": "sandbox/test_loop.py::test_random_values_do_not_keep_the_loop",
    "The thread shares Python's lock": NO_PROMISE,
    "A session that is closed leaves": "sandbox/test_loop.py::test_sessions_leave_nothing_to_the_garbage_collector",
    "A long text is one item": "sandbox/test_bounds.py::test_what_honest_guests_send_is_taken",
    "These limits do not apply": "sandbox/test_bounds.py::test_the_host_may_send_more",
    "`monty` (`pip": "sandbox/test_monty.py::test_it_is_imported_where_python_lacks_what_only_unix_has",
    "It is a small Python interpreter": "sandbox/test_monty.py::test_walls",
    "These parts of the engine work": "engine/test_monty.py::test_a_whole_run",
    "If a cell uses something": "engine/test_monty.py::test_what_it_lacks_is_said_in_the_cell",
    "no generators": "engine/test_monty.py::test_what_it_lacks_is_said_in_the_cell",
    "no `history`": "engine/test_monty.py::test_a_whole_run",
    "a cell that is stopped": "sandbox/test_monty.py::test_a_stopped_cell_is_undone",
    "no forks": "engine/test_monty.py::test_a_search_may_begin_but_not_branch_a_session",
    "each session has a copy": "engine/test_monty.py::test_the_context_of_the_host_is_not_what_the_session_changes",
    "[What the jail stops": NO_PROMISE,
    "[Forks of a session]": NO_PROMISE,
}
ISOLATION = {
    "[Where code runs]": NO_PROMISE,
    "This page says": NO_PROMISE,
    "The code in a session is hostile": NO_PROMISE,
    "The code must not read": "attacks: files",
    "Trusted are": NO_PROMISE,
    "The code shares its process": NO_PROMISE,
    "It can therefore lie": "attack: an own end, forged",
    "The host treats every frame as hostile": "sandbox/test_session.py::test_a_lie_ends_the_session",
    "The output of a session is a claim": NO_PROMISE,
    "The jail takes the strongest tier": "sandbox/test_kernels.py::test_what_is_missing_costs_the_tiers_that_need_it",
    "A tier below": "sandbox/test_jail.py::test_a_weaker_tier_than_asked_for_is_refused_with_the_way_to_get_it",
    "| | A | B | C |": NO_PROMISE,
    "| needs |": "sandbox/test_kernels.py::test_what_is_missing_costs_the_tiers_that_need_it",
    "| typical |": "sandbox/test_kernels.py::test_sessions_in_a_container_of_docker",
    "| files of the host |": "attack: existence, size and time of files",
    "| its own files |": "sandbox/test_jail.py::test_a_session_writes_into_its_own_folder_up_to_a_limit",
    "| imports in a session |": "sandbox/test_kernels.py::test_the_whole_standard_library_can_be_imported",
    "| network |": "attacks: network",
    "| other processes |": "attacks: signals",
    "| starting processes |": "sandbox/test_jail.py::test_only_the_host_makes_processes",
    "| threads |": "sandbox/test_jail.py::test_threads_are_limited",
    "| memory, output, CPU time |": "sandbox/test_jail.py::test_processor_time_ends_a_session",
    "| if the host is killed |": "sandbox/test_jail.py::test_everything_ends_with_the_host",
    "Each line is tested": "sandbox/attacks/test_attacks.py::test_there_are_many",
    "At tier A all of them": "sandbox/attacks/test_attacks.py::test_contained",
    "Attacks that aim at barriers": "sandbox/attacks/test_attacks.py::test_is_an_attack",
    "`tests/sandbox/test_kernels.py` emulates": "sandbox/test_kernels.py::test_what_is_missing_costs_the_tiers_that_need_it",
    "If Ramify runs as root at tier B": "sandbox/test_jail.py::test_root_is_nobody_inside",
    "If that user may not read": "sandbox/test_kernels.py::test_the_whole_standard_library_can_be_imported",
    "An installed package": "sandbox/test_jail.py::test_packages_of_the_host_are_importable_on_request",
    "Of a package found elsewhere": "sandbox/test_packages.py::test_only_what_can_be_imported_is_shown",
    "If it imports others": NO_PROMISE,
    "If that folder is a namespace": "sandbox/test_packages.py::test_a_namespace_of_two_folders_and_a_link_to_a_checkout",
    "**A kernel vulnerability.**": "sandbox/test_jail.py::test_the_tables_agree_with_libseccomp",
    "Code of several mutually hostile": NO_PROMISE,
    "**Side channels**": NO_PROMISE,
    "**Total memory**": NO_PROMISE,
    "`memory_bytes` limits": "check: memory runs out as MemoryError",
    "`all_memory_bytes` ends": "sandbox/test_jail.py::test_the_session_that_uses_most_is_ended_when_all_use_too_much",
    "Between two checks": NO_PROMISE,
    "A cgroup around": NO_PROMISE,
    "**CPU time**": NO_PROMISE,
    "`cell_s`, `cpu_s`": "sandbox/test_jail.py::test_processor_time_ends_a_session",
    "**What you pass in**": "sandbox/test_jail.py::test_a_mount_is_read_only_and_where_it_was_asked_for",
    "**What goes out**": NO_PROMISE,
    "It reaches": NO_PROMISE,
    "**Interpreter bugs**": NO_PROMISE,
}
FORKS = {
    "`session.fork()` makes": "check: a fork that would lose something is refused",
    "Only then may one process": "attack: a process in the place of a branch",
    "Forks requested at the same time": "sandbox/test_forks.py::test_many_forks_at_once_in_the_middle_of_a_call",
    "From then on neither": "sandbox/test_jail.py::test_a_fork_makes_files_read_only_for_both",
    "`close_tree()` ends": "sandbox/test_jail.py::test_a_tree_closes_together",
    "After a fork both": "attack: hooks that keep a relative's wire",
    "It does so only if": "attack: a runtime that keeps a pipe across a fork: all but one closed",
    "This needs Linux 5.9": "sandbox/test_forks.py::test_before_linux_6_2_every_descriptor_is_replaced",
    "The host no longer reads": "attack: frames forged on the wire of a relative",
    "No hook runs": "attack: hooks that hang around the fork",
    "A branch is not a child": "attack: how a branch ends",
    "Sessions cannot create shared": "attack: memory mapped before a fork",
    "So nothing that one process": "attacks: branches",
    "With `rollback=True`": "sandbox/test_forks.py::test_sessions_of_one_tree_are_rolled_back_side_by_side",
    "If no fork could be kept": "sandbox/test_forks.py::test_a_rollback_that_could_not_be_prepared_is_reported",
}
PAGES = {"sandbox": SANDBOX, "isolation": ISOLATION, "forks": FORKS}


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences and table rows of a page, without headings and code."""
    text = re.sub(r"^```.*?^```$|^#[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=- |\|)", text):
        line = " ".join(block.split()).removeprefix("- ")
        if line.startswith("|"):
            yield from [] if re.fullmatch(r"[|\- ]+", line) else [line]
        elif line:
            yield from re.split(r"(?<=[.:])\s+(?=[A-Z`(\[])", line)


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_has_its_proof(page: str) -> None:
    found = list(sentences((DOCS / f"{page}.md").read_text("utf-8")))
    matches = [[start for start in PAGES[page] if line.startswith(start)] for line in found]
    assert [line for line, starts in zip(found, matches, strict=True) if len(starts) != 1] == []
    assert set(PAGES[page]) == {start for starts in matches for start in starts}


def exists(proof: str) -> bool:
    kind, _, name = proof.partition(": ")
    if proof == NO_PROMISE:
        return True
    if kind in ("attack", "attacks", "check"):
        known = {
            "attack": set(ATTACKS),
            "attacks": {attack.kind for attack in ATTACKS.values()},
            "check": {check.name for check in CHECKS},
        }
        return name in known[kind]
    file, _, test = proof.partition("::")
    return f"def {test}(" in (TESTS / file).read_text("utf-8") if test else (TESTS / file).exists()


def test_every_proof_exists() -> None:
    proofs = {proof for page in PAGES.values() for proof in page.values()}
    assert [proof for proof in proofs if not exists(proof)] == []
