// The head of a run's page: its answer, whether it is right, which calls differ from their siblings,
// and one line on how the run ended and what it used. Details (what each depth cost, where the run
// came from) are folded.

import { load, offline } from "./api.js";
import { fill, h } from "./dom.js";
import { FoldedText } from "./folded.js";
import {
  count,
  dollars,
  grouped,
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
const MAX_SHORT = 44; // characters of an answer in large letters
const SHOWN_FROM = 0.5; // share of a limit from which it is shown
const KEPT = ["formatted", "short", "long", "cut", "open", "was-live"]; // classes of the answer

export class Story {
  // run: the page's model; address(call, turn) is the address of a call.
  constructor(run, address) {
    this.run = run;
    this.address = address;
    this.status = h("span.badge.status");
    this.worth = h("span.worths");
    this.question = h("h1");
    this.answer = h("div.story-answer", {
      tabindex: "0",
      role: "region",
      "aria-label": "answer of the run",
    });
    this.folds = [
      new FoldedText(this.question, { share: 0.06, least: 48, label: "question" }),
      new FoldedText(this.answer, { share: 0.3, least: 128, label: "answer" }),
    ];
    this.ending = h("span.ending");
    this.note = h("p.review-note", { hidden: true });
    this.differing = h("p.differing");
    this.budget = h("dl.budget", { "aria-label": "use of the limits" });
    this.depths = h("p.by-depth");
    this.meta = h("p.meta");
    this.details = h("div.story-details", { hidden: true, id: "details" }, this.depths, this.meta);
    this.opener = h(
      "button.small",
      {
        type: "button",
        "aria-expanded": "false",
        "aria-controls": "details",
        onclick: () => this.openDetails(this.details.hidden),
      },
      "details",
    );
    this.forked = h("p.forked", { hidden: true });
    this.mode = h("p.mode", { hidden: true });
    this.tools = h("div.run-tools");
    this.sources = new Sources(run);
    this.onanswer = null; // called when the answer has been drawn
    this.element = h(
      "section.story",
      { "aria-label": "what happened" },
      h(
        "div.story-top",
        null,
        h("div.asked", null, this.question, this.folds[0].button),
        this.tools,
      ),
      h("div.hero", null, this.answer, this.folds[1].button),
      this.sources.citations,
      this.note,
      h("div.story-line", null, this.worth, this.status, this.ending, this.budget),
      this.differing,
      this.forked,
      this.mode,
      this.details,
      this.sources.read,
      this.sources.text,
    );
  }

  close() {
    for (const fold of this.folds) fold.close();
  }

  openDetails(isOpen) {
    this.details.hidden = !isOpen;
    this.opener.setAttribute("aria-expanded", String(isOpen));
    this.drawDetails();
  }

  draw() {
    const head = this.run.head,
      [words, tone] = stopWords(head.stop, head.alive);
    const unreadable = head.problems.length && !this.run.calls.length,
      question = head.question || (unreadable ? "this run cannot be shown" : "starting …");
    if (this.question.textContent !== question) {
      this.question.textContent = question;
      this.folds[0].fold();
    }
    document.title = `${oneLine(head.question, 50) || "run"} · Ramify`;
    this.status.textContent = unreadable ? "unreadable" : words;
    this.status.className = `badge status ${unreadable ? "bad" : tone}`;
    this.drawWorth(head);
    this.drawAnswer(head, unreadable);
    // the badge before it names the kind of the end
    this.ending.textContent = head.stop
      ? head.ending.replace(/^[a-z_]+[,:] /, "")
      : head.alive && this.run.calls.length && this.run.calls[0].kind !== "strategy"
        ? `in turn ${Math.max(1, this.run.calls[0].turns)}`
        : "";
    this.drawDiffering();
    this.drawDetails();
    this.drawForked(head.forked);
    this.mode.hidden = !head.mode;
    this.mode.textContent = `mode ${head.mode}${head.mode_reason ? `: ${head.mode_reason}` : ""}`;
    this.sources.draw();
    this.tick();
  }

  drawDetails() {
    const head = this.run.head;
    if (this.details.hidden) return;
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
      forked.edited ? `, with the ${forked.edited} edited` : "",
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
        h("span.badge.tag.verdict", { title: `label by ${who}` }, `${who}: ${verdict}`),
      ),
    );
    this.note.hidden = !note;
    this.note.textContent = note;
  }

  drawAnswer(head, unreadable) {
    const [, tone] = stopWords(head.stop, head.alive),
      scores = Object.values(scoresOf(head));
    const worth = scores.some((value) => value <= 0)
      ? "bad"
      : scores.length && scores.every((value) => value >= 1)
        ? "good"
        : tone;
    const kept = [...this.answer.classList].filter((name) => KEPT.includes(name));
    if (head.alive && !head.stop) kept.push("was-live");
    this.answer.className = ["story-answer", head.has_answer ? worth : tone, ...new Set(kept)].join(
      " ",
    );
    this.answer.parentElement.hidden = Boolean(unreadable);
    if (head.has_answer) this.drawText(head.answer);
    else this.drawMissing(head);
  }

  drawMissing(head) {
    const words = head.stop
      ? "no answer"
      : head.alive
        ? "no answer yet"
        : "no answer: the run was interrupted";
    if (this.text === words) return;
    this.text = words;
    fill(this.answer, h("span.quiet", null, words));
    this.setSize("");
  }

  // Text first; with its formatting when that has been loaded.
  async drawText(text) {
    if (this.text === text) return;
    this.text = text;
    this.answer.classList.remove("formatted");
    fill(this.answer, text || "(an empty answer)");
    this.setSize(text);
    if (hasMarkup(text)) {
      const formatted = await load("markdown");
      if (this.text !== text) return;
      fill(this.answer, formatted(text));
      this.answer.classList.add("formatted");
      this.folds[1].fold();
    }
    this.onanswer?.();
  }

  // A short answer is large.
  setSize(text) {
    const lines = text.split("\n").length;
    this.answer.classList.toggle("short", lines === 1 && text.length <= MAX_SHORT);
    this.answer.classList.toggle("long", lines > 4 || text.length > 280);
    this.folds[1].fold();
  }

  drawDiffering() {
    const calls = this.run.calls,
      differing = calls.filter((call) => call.outlier);
    const made = calls.filter((call) => call.parent === 0),
      failed = calls.filter((call) => call.failed).length;
    this.differing.hidden = !made.length && !this.run.alive;
    if (!made.length) return void fill(this.differing, "no sub-calls yet");
    const sort = made.some((call) => call.kind === "rlm")
      ? ["child", "children"]
      : ["sub-call", "sub-calls"];
    fill(this.differing, [
      `from ${grouped(made.length)} ${sort[made.length === 1 ? 0 : 1]}`,
      failed ? h("span.bad", null, `, ${many(failed, "call")} failed`) : "",
      differing.length ? ": " : "",
      differing
        .slice(0, MAX_NAMED)
        .map((call, index) => [
          index ? " · " : "",
          h(
            "a.odd",
            { class: call.failed ? "bad" : "", href: this.address(call.id, null) },
            call.outlier,
          ),
        ]),
      differing.length > MAX_NAMED ? `, and ${differing.length - MAX_NAMED} more differ` : "",
    ]);
  }

  // What was used so far. From half of a limit on, the limit and a bar are shown, too. In a run in
  // progress they advance without events.
  tick() {
    const head = this.run.head,
      limits = head.limits,
      spent = this.run.now(),
      num = (noun) => (value) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
    const slots = [
      ["requests", head.usage.calls, limits.max_calls, num("request"), count],
      [
        "tokens",
        head.usage.input_tokens + head.usage.output_tokens,
        limits.max_tokens,
        num("token"),
        count,
      ],
      ["cost", head.cost, limits.max_cost, dollars, dollars],
      [
        "time",
        head.stop ? head.seconds : spent,
        limits.max_seconds,
        head.stop ? seconds : ticking,
        seconds,
      ],
    ];
    if (!this.slots) {
      this.slots = slots.map(() => ({ text: h("span"), bar: h("i"), place: h("div") }));
      this.slots.forEach(({ text, bar, place }, index) => {
        fill(
          place,
          h("dt.offscreen", null, slots[index][0]),
          h("dd", null, text, h("span.bar", null, bar)),
        );
      });
      fill(
        this.budget,
        this.slots.map(({ place }) => place),
      );
    }
    slots.forEach(([, value, limit, words, limitWords], index) => {
      const { text, bar, place } = this.slots[index],
        share = limit && value ? Math.min(1, value / limit) : 0,
        isNear = share >= SHOWN_FROM;
      const said = `${isNear ? `${limitWords(value)} of ${words(limit)}` : value === null ? "" : words(value)}`;
      if (text.textContent !== said) text.textContent = said;
      place.hidden = !said;
      place.className = `${index === 3 ? "clock" : ""}${isNear ? " near" : ""}`;
      if (isNear) bar.style.width = `${(100 * share).toFixed(1)}%`;
      bar.className = share >= 0.9 ? "bad" : share >= 0.75 ? "warn" : "";
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
