// Labelling the runs of a filter: the list of them beside the answer that is chosen. A key says
// whether it is right, and the next one comes by itself. The queue stays as it was opened, also if
// a label means that a run no longer matches.
//
//   #/label/FILTER[?at=KEY]

import { get } from "./api.js";
import { fill, h, toast } from "./dom.js";
import { FilterInput } from "./filter.js";
import { many, number, oneLine, runAddress, stopWords } from "./format.js";
import { VirtualList } from "./list.js";
import { RUN_FIELDS } from "./run_fields.js";
import { listPlaces } from "./run_list.js";
import { worthTone } from "./story.js";
import { AnswerCard, agreementWords, saveNote, sayVerdict, verdictBadge } from "./verdicts.js";

const ROW = 34; // pixels

export async function labelPage(page, [filter = ""], query) {
  const view = new LabelView(filter, query.get("at") || "");
  await view.start(page);
  return view;
}

class LabelView {
  constructor(filter, at) {
    this.at = at;
    this.queue = [];
    this.chosen = null;
    this.ticked = new Set(); // keys of runs that are labelled together
    this.filter = new FilterInput(RUN_FIELDS, {
      label: "filter the runs to label",
      placeholder: "runs to label: words, or label:none task:… model:…",
      text: filter,
      changed: () => this.runs && this.arrange(),
      id: "filter",
    });
    this.list = new VirtualList({
      rowHeight: ROW,
      make: () =>
        h(
          "div.label-row",
          null,
          h("span.num.worth"),
          h("span.asked"),
          h("span.replied"),
          h("span.said-of"),
        ),
      show: (row, index) => this.show(row, this.queue[index]),
      pick: (index, event) => {
        if (event?.key === "Enter") return this.open();
        if (event?.shiftKey) this.tick(this.queue[index]);
        else this.choose(this.queue[index]);
      },
      label: "runs to label",
    });
    this.list.onmove = (index) => this.choose(this.queue[index]);
  }

  async start(page) {
    document.title = "Labelling · Ramify";
    this.tally = h("span.quiet", { "aria-live": "polite" });
    this.agreement = h("p.quiet.agreement", { hidden: true });
    this.none = h("p.note", { hidden: true });
    this.card = new AnswerCard({
      said: (verdict) => this.say(verdict),
      noted: (note) => this.note(note),
    });
    fill(
      page,
      h(
        "div.wide",
        null,
        h(
          "div.wide-head",
          null,
          h("h1", null, "Labelling"),
          this.filter.input,
          this.tally,
          this.filter.fix,
        ),
        this.agreement,
        this.none,
        h("div.matrix-beside", null, h("div.matrix", null, this.list.box), this.card.element),
      ),
    );
    this.runs = (await listPlaces()).runs.filter((run) => !run.problem);
    this.arrange();
    await this.drawAgreement();
  }

  close() {
    this.list.close();
  }

  // The queue, with what was said so far.
  shared() {
    const columns = ["question", "answer", "label", "reward", "note", "run"],
      rows = this.queue.map((run) => [
        run.question || "",
        run.answer ?? run.ending ?? "",
        verdictOf(run) || "",
        typeof run.reward === "number" ? number(run.reward) : "",
        run.note || "",
        run.id,
      ]);
    return {
      name: "labels",
      title: `Labels${this.filter.text.trim() ? `: ${this.filter.text.trim()}` : ""}`,
      parts: [{ text: this.tally.textContent }, { table: { head: columns, rows } }],
    };
  }

  arrange() {
    const { matches, order } = this.filter;
    this.queue = this.runs.filter(matches);
    if (order) this.queue.sort(order);
    this.list.box.style.height = `${Math.min(20, Math.max(1, this.queue.length)) * ROW + 2}px`;
    this.none.hidden = this.queue.length > 0;
    this.none.textContent = this.filter.problem
      ? "The filter cannot be read."
      : "No runs match the filter.";
    this.list.set(this.queue.length);
    this.choose(this.queue.find((run) => run.key === this.at) || this.queue[0] || null);
    this.drawTally();
  }

  drawTally() {
    const done = this.queue.filter(verdictOf).length;
    fill(this.tally, `${number(done)} of ${many(this.queue.length, "run")} labelled`);
  }

  show(row, run) {
    const [worth, asked, replied, said] = row.children;
    worth.textContent = typeof run.reward === "number" ? number(run.reward) : "–";
    worth.className = `num worth ${typeof run.reward === "number" ? worthTone(run.reward) : ""}`;
    asked.textContent = oneLine(run.question || run.id, 200);
    replied.textContent = oneLine(run.answer || run.ending || "", 120);
    const verdict = verdictOf(run);
    fill(said, verdict ? verdictBadge(verdict) : null);
    row.classList.toggle("ticked", this.ticked.has(run.key));
    row.title = `${run.question}\n${run.answer ?? run.ending ?? ""}`;
  }

  choose(run) {
    this.chosen = run;
    this.card.element.hidden = !run;
    if (run) {
      this.list.setActive(this.queue.indexOf(run));
      this.card.show(answeredBy(run));
    }
    const words = this.filter.text.trim(),
      at = run ? `?${new URLSearchParams({ at: run.key })}` : "";
    history.replaceState(null, "", `#/label/${encodeURIComponent(words)}${at}`);
  }

  move(step) {
    const at = this.queue.indexOf(this.chosen);
    const next = this.queue[Math.min(this.queue.length - 1, Math.max(0, at + step))];
    if (next) this.choose(next);
  }

  tick(run) {
    if (!run) return;
    if (!this.ticked.delete(run.key)) this.ticked.add(run.key);
    this.list.draw(true);
    if (this.ticked.size)
      toast(`${many(this.ticked.size, "answer")} ticked: 1, 0 or s labels all of them`);
  }

  open() {
    if (this.chosen) location.hash = runAddress(this.chosen.key);
  }

  async say(verdict) {
    if (!this.chosen) return;
    const keys = this.ticked.size ? [...this.ticked] : [this.chosen.key];
    if (!this.ticked.size) this.move(1);
    this.ticked.clear();
    await this.saved(sayVerdict(keys, verdict));
  }

  async note(text) {
    if (this.chosen) await this.saved(saveNote(this.chosen.key, text));
  }

  async saved(request) {
    try {
      const reviews = await request;
      for (const run of this.queue)
        if (reviews[run.key]) {
          const { verdict, verdicts, note } = reviews[run.key];
          run.said = { verdict, verdicts };
          run.note = note;
        }
      if (this.chosen) this.card.drawVerdicts(answeredBy(this.chosen));
      this.list.draw(true);
      this.drawTally();
      await this.drawAgreement();
    } catch (error) {
      toast(error.message);
    }
  }

  // Agreement counts only after a second person has labelled.
  async drawAgreement() {
    const { agreements } = await get("/api/agreements");
    this.agreement.hidden = !agreements.length;
    this.agreement.textContent = agreementWords(agreements);
  }

  keys() {
    return {
      j: ["next run", () => this.move(1)],
      k: ["previous run", () => this.move(-1)],
      Enter: ["open the run", () => this.open()],
      x: ["tick the run, to label several at once", () => this.tick(this.chosen)],
      ...this.card.keys(),
      "/": ["filter", () => this.filter.focus()],
    };
  }
}

const SAID = ["right", "wrong", "not sure", "disputed"];

function isVerdict(label) {
  return SAID.includes(label);
}

// What people say: as it was listed, or as it was stored here since.
function verdictOf(run) {
  return run.said ? run.said.verdict : (run.labels || []).find(isVerdict) || "";
}

// What the card shows of a run.
/** @returns {import("./verdicts.js").Answered} */
function answeredBy(run) {
  return {
    run: run.key,
    title: run.task || run.id,
    question: run.question || "",
    expected: "",
    answer: run.answer ?? "",
    error: run.ending || "",
    outcome:
      typeof run.reward === "number"
        ? [`score ${number(run.reward)}`, worthTone(run.reward)]
        : stopWords(run.stop, run.alive),
    verdicts: run.said?.verdicts || {},
    note: run.note || "",
    siblings: [],
  };
}
