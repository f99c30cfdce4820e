"""Maps every sentence and table row of the sandbox pages to its proof: a test, an attack or a
conformance check. A new or changed sentence fails here until it has a proof."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks.base import ATTACKS
from attacks.cases import ATTACKS as ALL_ATTACKS

from ramify.testing.sandbox_conformance import CHECKS

assert ALL_ATTACKS is ATTACKS
TESTS = Path(__file__).resolve().parents[1]
DOCS = TESTS.parent / "docs"
NO_PROMISE = "advice or definition"

SANDBOX = {
    "The model writes Python": NO_PROMISE,
    "`SandboxSpec` has the limits": "sandbox/test_specs.py::test_a_spec_is_completed_by_its_provider",
    "Options of one provider": "sandbox/test_specs.py::test_a_spec_is_completed_by_its_provider",
    "`ramify.JailSpec` (": "sandbox/test_specs.py::test_a_spec_is_completed_by_its_provider",
    "A field that a provider does not have": "sandbox/test_specs.py::test_a_wrong_field_says_what_to_write",
    "If the parameter of `open_provider`": "sandbox/test_specs.py::test_a_plugin_has_options_of_its_own",
    "`SandboxSpec(provider=…)` chooses": NO_PROMISE,
    "The default is `jail`": "sandbox/test_default.py::test_weak_sandbox_warning_is_silenced_only_by_naming_it",
    "If the jail is not available": "sandbox/test_default.py::test_unavailable_tier_is_refused_with_remedy",
    "**Linux without a jail**": "sandbox/test_jail.py::test_weaker_tier_than_requested_is_refused_with_remedy",
    "`allow_weaker=True` (`--allow-weaker`) takes": "sandbox/test_default.py::test_accepted_weaker_sandbox_gives_warning",
    "**macOS, Windows**": "sandbox/test_jail.py::test_unsupported_platform_is_refused_unless_allow_weaker",
    "`allow_weaker=True` takes `process`": "sandbox/test_jail.py::test_unsupported_platform_is_refused_unless_allow_weaker",
    "A `WeakSandboxWarning` reports": "sandbox/test_default.py::test_accepted_weaker_sandbox_gives_warning",
    "To confirm that you know": "sandbox/test_default.py::test_weak_sandbox_warning_is_silenced_only_by_naming_it",
    "| provider |": NO_PROMISE,
    "| `jail` |": "sandbox/test_conformance.py::test_conformance_check",
    "| `process` |": "sandbox/test_conformance.py::test_conformance_check",
    "| `inprocess` |": "sandbox/test_conformance.py::test_conformance_check",
    "| `ipython` |": "sandbox/test_ipython.py::test_conformance_check",
    "| `docker` |": "sandbox/test_docker.py::test_conformance_check",
    "| `modal`": "sandbox/test_cloud.py::test_conformance_check",
    "| `prime` |": "sandbox/test_cloud.py::test_conformance_check",
    "| `monty` |": "sandbox/test_monty.py::test_files_processes_and_network_are_unreachable",
    "`ramify doctor` says": "sandbox/test_default.py::test_doctor_reports_reached_tier",
    "`python -m ramify.testing sandbox": "sandbox/test_conformance.py::test_conformance_check",
    "To add a provider": "cli/test_plugins.py",
    "`Session.run` returns": "test_public.py",
    '`SandboxSpec(provider="my.module")`': "cli/test_plugins.py",
    "Docker and the clouds have been tested": NO_PROMISE,
    "The clouds' doubles and calls": "sandbox/test_cloud.py::test_doubles_match_sdk_signatures",
    "An SDK that lacks a call": "sandbox/test_cloud_deletes.py::test_incompatible_sdk_is_refused_before_anything_is_created",
    "A box is deleted however": "sandbox/test_cloud_deletes.py::test_failed_start_step_leaves_no_box",
    "Every value that code sends": "sandbox/test_value_limits.py::test_json_counts_match_recursive_walk",
    "A cell that sends more than the limit": "sandbox/test_value_limits.py::test_oversized_value_raises_in_cell_and_session_survives",
    "A session that sends more by bypassing": "sandbox/test_value_limits.py::test_oversized_value_from_lying_guest_is_refused_naming_limit",
    "Its call gets a new one": "engine/test_session_deaths.py::test_variables_are_restored_without_repeating_calls",
    "| in one call or answer |": NO_PROMISE,
    "| bytes |": "sandbox/test_value_limits.py::test_oversized_value_raises_in_cell_and_session_survives",
    "| items of all lists and dicts |": "sandbox/test_value_limits.py::test_oversized_value_raises_in_cell_and_session_survives",
    "| lists and dicts;": "sandbox/test_value_limits.py::test_oversized_value_raises_in_cell_and_session_survives",
    "| keys of all dicts": "sandbox/test_value_limits.py::test_oversized_value_raises_in_cell_and_session_survives",
    "| strings above": "sandbox/test_value_limits.py::test_oversized_value_raises_in_cell_and_session_survives",
    "| nesting": "sandbox/test_value_limits.py::test_documented_nesting_limit_is_exact",
    "| digits": "sandbox/test_value_limits.py::test_oversized_value_raises_in_cell_and_session_survives",
    "| keys of a set": "sandbox/test_value_limits.py::test_oversized_value_raises_in_cell_and_session_survives",
    "| prompts": "engine/test_hostile_values.py",
    "A value whose JSON is longer": "sandbox/test_loop.py::test_no_frame_blocks_event_loop",
    "Smaller ones are decoded at once": "sandbox/test_loop.py::test_no_frame_blocks_event_loop",
    "So whatever a session sends": "sandbox/test_loop.py::test_random_values_do_not_block_event_loop",
    "The thread shares Python's lock": NO_PROMISE,
    "A session that is closed leaves": "sandbox/test_loop.py::test_closed_sessions_leave_no_reference_cycles",
    "A long text is one item": "sandbox/test_value_limits.py::test_value_within_limits_is_accepted",
    "These limits do not apply": "sandbox/test_value_limits.py::test_limits_do_not_apply_to_values_from_host",
    "`monty` (`pip": "sandbox/test_monty.py::test_imports_without_unix_only_modules",
    "It is a small Python interpreter": "sandbox/test_monty.py::test_files_processes_and_network_are_unreachable",
    "These parts of the engine work": "engine/test_monty.py::test_complete_run_in_monty",
    "If a cell uses something": "engine/test_monty.py::test_unsupported_feature_is_an_error_in_the_cell",
    "no generators": "engine/test_monty.py::test_unsupported_feature_is_an_error_in_the_cell",
    "no `history`": "engine/test_monty.py::test_complete_run_in_monty",
    "a cell that is stopped": "sandbox/test_monty.py::test_stopped_cell_is_rolled_back",
    "no forks": "engine/test_monty.py::test_search_can_branch_first_turns_but_not_sessions",
    "each session has a copy": "engine/test_monty.py::test_session_cannot_change_the_context_of_the_host",
}
ISOLATION = {
    "This page says": NO_PROMISE,
    "The code in a session is hostile": NO_PROMISE,
    "The code must not read": "attacks: files",
    "Trusted are": NO_PROMISE,
    "The code shares its process": NO_PROMISE,
    "It can therefore lie": "attack: an own end, forged",
    "The host treats every frame as hostile": "sandbox/test_session.py::test_protocol_violation_ends_session",
    "The output of a session is a claim": NO_PROMISE,
    "The jail takes the strongest tier": "sandbox/test_kernels.py::test_missing_kernel_feature_lowers_the_tier",
    "A tier below": "sandbox/test_jail.py::test_weaker_tier_than_requested_is_refused_with_remedy",
    "| | A | B | C |": NO_PROMISE,
    "| needs |": "sandbox/test_kernels.py::test_missing_kernel_feature_lowers_the_tier",
    "| typical |": "sandbox/test_kernels.py::test_sessions_run_confined_in_docker_container",
    "| files of the host |": "attack: existence, size and time of files",
    "| its own files |": "sandbox/test_jail.py::test_session_folder_is_private_and_size_limited",
    "| imports in a session |": "sandbox/test_kernels.py::test_the_whole_standard_library_can_be_imported",
    "| network |": "attacks: network",
    "| other processes |": "attacks: signals",
    "| starting processes |": "sandbox/test_jail.py::test_only_host_can_create_processes",
    "| threads |": "sandbox/test_jail_limits.py::test_threads_are_limited",
    "| memory, output, CPU time |": "sandbox/test_jail_limits.py::test_cpu_time_limit_ends_session",
    "| if the host is killed |": "sandbox/test_jail.py::test_killed_host_takes_all_sessions_with_it",
    "Each line is tested": "sandbox/attacks/test_attacks.py::test_attack_suite_is_large",
    "At tier A all of them": "sandbox/attacks/test_attacks.py::test_attack_is_contained",
    "Attacks that aim at barriers": "sandbox/attacks/test_attacks.py::test_attack_reaches_goal_without_isolation",
    "`tests/sandbox/test_kernels.py` emulates": "sandbox/test_kernels.py::test_missing_kernel_feature_lowers_the_tier",
    "If Ramify runs as root at tier B": "sandbox/test_jail.py::test_root_becomes_unprivileged_user_inside",
    "If that user may not read": "sandbox/test_kernels.py::test_the_whole_standard_library_can_be_imported",
    "An installed package": "sandbox/test_jail.py::test_packages_of_the_host_are_importable_on_request",
    "Of a package found elsewhere": "sandbox/test_packages.py::test_only_importable_files_are_visible",
    "If it imports others": NO_PROMISE,
    "If that folder is a namespace": "sandbox/test_packages.py::test_namespace_package_and_linked_checkout_hide_other_files",
    "**A kernel vulnerability.**": "sandbox/test_jail.py::test_system_call_tables_match_libseccomp",
    "Code of several mutually hostile": NO_PROMISE,
    "**Side channels**": NO_PROMISE,
    "**Total memory**": NO_PROMISE,
    "`memory_bytes` limits": "check: memory runs out as MemoryError",
    "`all_memory_bytes` ends": "sandbox/test_jail_limits.py::test_largest_session_is_ended_when_total_memory_is_exceeded",
    "Between two checks": NO_PROMISE,
    "A cgroup around": NO_PROMISE,
    "**CPU time**": NO_PROMISE,
    "`cell_s`, `cpu_s`": "sandbox/test_jail_limits.py::test_cpu_time_limit_ends_session",
    "**What you pass in**": "sandbox/test_jail.py::test_mount_is_read_only_at_requested_path",
    "**What goes out**": NO_PROMISE,
    "It reaches": NO_PROMISE,
    "**Interpreter bugs**": NO_PROMISE,
}
STARTS = {
    "![The timeline of a cold question": NO_PROMISE,
    "`ramify ask` over more than a small file": "sandbox/test_early_start.py::test_guess_from_the_arguments",
    "An `RLM` whose every question": "sandbox/test_early_start.py::test_entered_rlm_starts_its_server_if_every_question_needs_one",
    "Nothing is spent before the walls": "sandbox/test_probed_tier.py::test_result_of_another_boot_or_kernel_does_not_count",
    "That result is in `walls.json`": "sandbox/test_probed_tier.py::test_place_that_others_can_write_to_is_not_used",
    "Each fork server tries out": "sandbox/test_probed_tier.py::test_each_fork_server_proves_its_own_walls",
    "`python scripts/cold_start.py`": NO_PROMISE,
}
FORKS = {
    "`session.fork()` makes": "check: a fork that would lose something is refused",
    "Only then may one process": "attack: a process in the place of a branch",
    "Forks requested at the same time": "sandbox/test_forks.py::test_concurrent_forks_during_host_call",
    "From then on neither": "sandbox/test_jail.py::test_fork_makes_files_read_only_for_both_sessions",
    "`close_tree()` ends": "sandbox/test_jail.py::test_close_tree_ends_every_branch",
    "After a fork both": "attack: hooks that keep a relative's wire",
    "It does so only if": "attack: a runtime that keeps a pipe across a fork: all but one closed",
    "This needs Linux 5.9": "sandbox/test_forks.py::test_every_descriptor_is_replaced_before_linux_6_2",
    "The host no longer reads": "attack: frames forged on the wire of a relative",
    "No hook runs": "attack: hooks that hang around the fork",
    "A branch is not a child": "attack: how a branch ends",
    "Sessions cannot create shared": "attack: memory mapped before a fork",
    "So nothing that one process": "attacks: branches",
    "With `rollback=True`": "sandbox/test_forks.py::test_sessions_of_one_tree_roll_back_concurrently",
    "Training forks sessions": "train/test_loop_algorithms.py::"
    "test_lines_of_rollouts_that_fork_are_learnt_from",
    "If no fork could be kept": "sandbox/test_forks.py::test_unprepared_rollback_is_reported",
}
PAGES = {"sandbox": SANDBOX | ISOLATION | STARTS | FORKS}


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
