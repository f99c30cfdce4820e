// The head of a run's page: its question and answer, whether the answer is right, why the run
// ended, which calls differ from their siblings, and what each depth cost.

import { load, offline } from "./api.js";
import { fill, h } from "./dom.js";
import {
  count,
  dollars,
  hasMarkup,
  many,
  moment,
  number,
  oneLine,
  runAddress,
  seconds,
  stopWords,
  ticking,
} from "./format.js";
import { Sources } from "./sources.js";

const MAX_NAMED = 3; // calls that differ and are named

export class Story {
  // run: the page's model; address(call, turn) is the address of a call.
  constructor(run, address) {
    this.run = run;
    this.address = address;
    this.status = h("span.badge.status");
    this.worth = h("span.worths");
    this.clock = h("span.clock");
    this.question = h("h1");
    this.answer = h("div.story-answer", {
      tabindex: "0",
      role: "region",
      "aria-label": "answer of the run",
    });
    this.ending = h("p.ending");
    this.note = h("p.review-note", { hidden: true });
    this.differing = h("p.differing");
    this.budget = h("dl.budget", { "aria-label": "budget" });
    this.depths = h("p.by-depth");
    this.meta = h("p.meta");
    this.forked = h("p.forked", { hidden: true });
    this.tools = h("div.run-tools");
    this.sources = new Sources(run);
    this.element = h(
      "section.story",
      { "aria-label": "what happened" },
      h("div.story-top", null, this.status, this.worth, this.clock, h("span.spread"), this.tools),
      h(
        "div.story-main",
        null,
        this.question,
        this.answer,
        this.sources.citations,
        this.note,
        this.differing,
      ),
      h("div.story-side", null, this.ending, this.budget, this.depths, this.forked, this.meta),
      this.sources.read,
      this.sources.text,
    );
  }

  draw() {
    const head = this.run.head,
      [words, tone] = stopWords(head.stop, head.alive);
    const unreadable = head.problems.length && !this.run.calls.length;
    this.question.textContent =
      head.question || (unreadable ? "a run that cannot be shown" : "starting …");
    document.title = `${oneLine(head.question, 50) || "run"} · Ramify`;
    this.status.textContent = unreadable ? "unreadable" : words;
    this.status.className = `badge status ${unreadable ? "bad" : tone}`;
    this.drawWorth(head);
    this.drawAnswer(head, unreadable);
    this.ending.textContent = head.ending ? `ended: ${head.ending}` : "";
    if (!head.stop && head.ending) this.ending.textContent = head.ending;
    this.drawDiffering();
    fill(
      this.depths,
      depthsOf(this.run).map((each) =>
        h(
          "span",
          null,
          h("b", null, `depth ${each.depth}`),
          ` ${each.models.join(", ")} · ${many(each.calls, "call")} · ${dollars(each.cost)} · ${seconds(each.busy)}`,
        ),
      ),
    );
    fill(
      this.meta,
      [
        moment(head.started_at),
        head.id,
        head.task ? `task ${head.task}` : "",
        head.context ? `context ${head.context.kind}, ${count(head.context.chars)} characters` : "",
        head.context?.by_reference ?? "",
        head.sandbox ? `sandbox ${head.sandbox}` : "",
        ...head.sources.map((path) => String(path)),
      ]
        .filter(Boolean)
        .join(" · "),
    );
    this.drawForked(head.forked);
    this.sources.draw();
    this.tick();
  }

  // A run that a person started from a turn of another one.
  drawForked(forked) {
    this.forked.hidden = !forked;
    if (!forked) return;
    const place = `${forked.run}, call ${forked.call}, turn ${forked.turn + 1}`;
    fill(
      this.forked,
      "run again from ",
      forked.key && !offline
        ? h(
            "a",
            {
              href: `${runAddress(forked.key)}/call/${encodeURIComponent(forked.call)}/turn/${forked.turn + 1}`,
            },
            place,
          )
        : place,
      forked.edited ? `, with edited ${forked.edited}` : "",
    );
  }

  drawWorth(head) {
    const { labels, note, rewards: corrected, verdicts } = head.review;
    fill(
      this.worth,
      head.gold
        ? h(
            "span.gold",
            { title: `the expected answer: ${head.gold}` },
            "expected ",
            h("b", null, oneLine(head.gold, 80)),
          )
        : null,
      Object.entries(scoresOf(head)).map(([name, value]) =>
        h(
          "span.badge.worth",
          {
            class: worthTone(value),
            title:
              name in corrected ? `corrected; recorded: ${number(head.rewards[name])}` : "reward",
          },
          `${name} ${number(value)}`,
          h("span.sign", null, value >= 1 ? " ✓" : value <= 0 ? " ✗" : ""),
          name in corrected ? " corrected" : "",
        ),
      ),
      labels.map((label) => h("span.badge.tag", null, label)),
      Object.entries(verdicts || {}).map(([who, verdict]) =>
        h("span.badge.tag.verdict", { title: `what ${who} says` }, `${who}: ${verdict}`),
      ),
    );
    this.note.hidden = !note;
    this.note.textContent = note;
  }

  drawAnswer(head, unreadable) {
    const [, tone] = stopWords(head.stop, head.alive),
      wrong = Object.values(scoresOf(head)).some((value) => value <= 0);
    const kept = this.answer.classList.contains("formatted") ? " formatted" : "";
    this.answer.className = `story-answer ${head.has_answer && wrong ? "bad" : tone}${kept}`;
    this.answer.hidden = Boolean(unreadable);
    if (head.has_answer) this.drawText(head.answer);
    else
      fill(
        this.answer,
        h(
          "span.quiet",
          null,
          head.stop
            ? "no answer"
            : head.alive
              ? "no answer yet"
              : "no answer: the run was interrupted",
        ),
      );
  }

  // Text first; with its formatting when that has been loaded.
  async drawText(text) {
    if (this.text === text) return;
    this.text = text;
    this.answer.classList.remove("formatted");
    fill(this.answer, text || "(an empty answer)");
    if (!hasMarkup(text)) return;
    const formatted = await load("markdown");
    if (this.text !== text) return;
    fill(this.answer, formatted(text));
    this.answer.classList.add("formatted");
  }

  drawDiffering() {
    const calls = this.run.calls,
      differing = calls.filter((call) => call.outlier);
    const made = calls.filter((call) => call.parent === 0),
      failed = calls.filter((call) => call.failed).length;
    this.differing.hidden = !made.length && !this.run.alive;
    if (!made.length) return void fill(this.differing, "no sub-call yet");
    const built =
      `built from ${many(made.length, made.some((call) => call.kind === "rlm") ? "child" : "sub-call")}`.replace(
        "childs",
        "children",
      );
    fill(this.differing, [
      built,
      failed ? h("span.bad", null, `, ${many(failed, "call")} failed`) : "",
      differing.length
        ? [
            `; ${differing.length === 1 ? "one differs" : `${differing.length} differ`} from ${differing.length === 1 ? "its" : "their"} siblings: `,
            differing
              .slice(0, MAX_NAMED)
              .map((call, index) => [
                index ? " · " : "",
                h("a.odd", { href: this.address(call.id, null) }, `${call.id} ${call.outlier}`),
              ]),
            differing.length > MAX_NAMED ? `, and ${differing.length - MAX_NAMED} more` : "",
          ]
        : "",
    ]);
  }

  // The clock and the bars of a run in progress advance without events.
  tick() {
    const head = this.run.head,
      limits = head.limits,
      spent = this.run.now();
    this.clock.textContent = head.stop ? seconds(head.seconds) : ticking(spent);
    const slots = [
      ["calls", head.usage.calls, limits.max_calls, count],
      ["tokens", head.usage.input_tokens + head.usage.output_tokens, limits.max_tokens, count],
      ["cost", head.cost, limits.max_cost, dollars],
      ["time", head.stop ? head.seconds : spent, limits.max_seconds, ticking],
    ];
    if (!this.slots) {
      this.slots = slots.map(([name]) => ({ text: h("span"), bar: h("i"), name }));
      fill(
        this.budget,
        this.slots.map(({ name, text, bar }) =>
          h("div", null, h("dt", null, name), h("dd", null, text, h("span.bar", null, bar))),
        ),
      );
    }
    slots.forEach(([, value, limit, words], index) => {
      const { text, bar } = this.slots[index],
        share = limit && value ? Math.min(1, value / limit) : 0;
      const said = `${value === null ? "–" : words(value)}${limit ? ` / ${words === ticking ? seconds(limit) : words(limit)}` : ""}`;
      if (text.textContent !== said) text.textContent = said;
      bar.style.width = `${(100 * share).toFixed(1)}%`;
      bar.className = share >= 0.9 ? "bad" : share >= 0.7 ? "warn" : "";
    });
  }
}

// The scores of a run; a corrected one replaces the recorded one.
export function scoresOf(head) {
  return { ...head.rewards, ...head.review.rewards };
}

export function worthTone(value) {
  return value >= 1 ? "good" : value <= 0 ? "bad" : "warn";
}

// Models, calls, dollars, and the seconds in which at least one call was open, of each depth.
function depthsOf(run) {
  const found = [];
  for (const call of run.calls) {
    found[call.depth] ||= {
      depth: call.depth,
      models: [],
      calls: 0,
      cost: null,
      busy: 0,
      until: 0,
    };
    const each = found[call.depth];
    if (!each.models.includes(call.model)) each.models.push(call.model);
    each.calls++;
    if (call.cost !== null) each.cost = (each.cost ?? 0) + call.cost;
    const end = call.ended_s ?? run.lastSeen(); // calls come in the order of their starts
    each.busy += Math.max(0, end - Math.max(call.started_s, each.until));
    each.until = Math.max(each.until, end);
  }
  return found.filter(Boolean);
}
