// What people say about answers: right, wrong or not sure, and a note. And the card of one answer,
// with what is needed to judge it: the question, the expected answer, why the run ended, the words
// of judges, and where it parts from another attempt. The server keeps verdicts beside the journal
// (see store/reviews.py).

import { get, post } from "./api.js";
import { fill, h, toast } from "./dom.js";
import { many, number, runAddress } from "./format.js";
import { textOf } from "./turn.js";

const VERDICTS = [
  ["1", "right"],
  ["0", "wrong"],
  ["s", "not sure"],
];
const TONES = { right: "good", wrong: "bad", "not sure": "warn", disputed: "odd" };
const PERSON = "ramify-person"; // under this name the browser keeps who labels
const AT_ONCE = 100; // runs of one request: the server reads each of them

export function person() {
  try {
    return localStorage.getItem(PERSON) || "";
  } catch {
    return "";
  }
}

function setPerson(name) {
  try {
    localStorage.setItem(PERSON, name.trim());
  } catch {
    // A browser without storage: the server's user is named.
  }
}

// Key of a run -> its review with this verdict. "none" takes the person's verdict back.
export async function sayVerdict(keys, verdict) {
  const reviews = {};
  for (let first = 0; first < keys.length; first += AT_ONCE) {
    const answer = await post("/api/verdict", {
      keys: keys.slice(first, first + AT_ONCE),
      verdict,
      person: person(),
    });
    Object.assign(reviews, answer.reviews);
  }
  toast(`${keys.length === 1 ? "labelled" : `${many(keys.length, "answer")} labelled`} ${verdict}`);
  return reviews;
}

export async function saveNote(key, note) {
  const { reviews } = await post("/api/verdict", { keys: [key], note, person: person() });
  toast("note saved");
  return reviews;
}

export function verdictBadge(verdict, who = "") {
  return h("span.badge", { class: TONES[verdict] || "" }, who ? `${who}: ${verdict}` : verdict);
}

// One sentence for each two people, or "".
export function agreementWords(agreements) {
  return agreements
    .map(({ people, both, same, kappa }) => {
      const beyond =
        kappa === null
          ? ""
          : ` (Cohen's kappa ${kappa.toFixed(2)}; 0 is chance agreement, 1 is full agreement)`;
      return `${people[0]} and ${people[1]} agree on ${same} of ${many(both, "answer")}${beyond}`;
    })
    .join("; ");
}

/**
 * @typedef {object} Answered what a list knows about an answer
 * @property {string} run key of its run, or ""
 * @property {string} title
 * @property {string} question
 * @property {string} expected
 * @property {string} answer
 * @property {string} error
 * @property {[string, string]} outcome words and tone
 * @property {Record<string, string>} verdicts
 * @property {string} note
 * @property {{ run: string, name: string, differs: boolean }[]} siblings other attempts
 */

// Keys of a page that labels: said(verdict) is called.
export function verdictKeys(words, said) {
  return Object.fromEntries(
    VERDICTS.map(([key, verdict]) => [key, [`${words} ${verdict}`, () => said(verdict)]]),
  );
}

export class AnswerCard {
  // said(verdict): a person gave the verdict of the answer that is shown; noted(note): a note.
  constructor({ said, noted }) {
    this.said = said;
    this.noted = noted;
    /** @type {Answered | null} */
    this.shown = null;
    this.body = h("div.card-body", { "aria-live": "polite" });
    this.verdicts = h("p.card-verdicts");
    this.note = h("textarea", {
      "aria-label": "note on this answer",
      placeholder: "note (n)",
      rows: "2",
      onchange: () => this.shown && this.noted(this.note.value.trim()),
    });
    this.note.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        this.note.blur();
      }
    });
    this.who = h("input", {
      type: "text",
      "aria-label": "your name",
      placeholder: "your name",
      maxlength: "60",
      value: person(),
      onchange: () => setPerson(this.who.value),
    });
    this.buttons = h(
      "div.card-buttons",
      { role: "group", "aria-label": "is the answer right?" },
      VERDICTS.map(([key, verdict]) =>
        h(
          `button.small.say-${TONES[verdict]}`,
          { type: "button", onclick: () => this.said(verdict) },
          verdict,
          h("kbd", null, key),
        ),
      ),
      h("label", null, "as ", this.who),
    );
    this.label = h("div.card-label", null, this.verdicts, this.buttons, this.note);
    this.element = h(
      "section.card",
      { "aria-label": "the chosen answer", tabindex: "0" },
      this.body,
      this.label,
    );
  }

  /** @param {Answered} answered */
  async show(answered) {
    const isSame = this.shown?.run === answered.run && this.shown?.title === answered.title;
    this.shown = answered;
    this.label.hidden = !answered.run;
    this.drawVerdicts(answered);
    if (isSame && this.head) return;
    this.head = null;
    this.call = null;
    this.draw();
    if (!answered.run) return;
    this.element.scrollTop = 0;
    try {
      const [picture, call] = await Promise.all([
        get("/api/run", { key: answered.run, texts: 1 }),
        get("/api/call", { key: answered.run, id: "0" }),
      ]);
      if (this.shown.run !== answered.run) return;
      this.head = picture.head;
      if (!Object.keys(answered.verdicts).length) this.drawVerdicts(picture.head.review);
      this.call = call;
      this.draw();
      await this.part(answered.siblings.find((each) => each.differs) || answered.siblings[0]);
    } catch (error) {
      if (this.shown.run === answered.run) this.body.append(h("p.problem", null, error.message));
    }
  }

  drawVerdicts({ verdicts, note }) {
    fill(
      this.verdicts,
      Object.entries(verdicts || {}).map(([who, verdict]) => verdictBadge(verdict, who)),
    );
    if (document.activeElement !== this.note) this.note.value = note || "";
  }

  draw() {
    const { shown, head, call } = this,
      [words, tone] = shown.outcome;
    const answer = head?.has_answer ? head.answer : shown.answer,
      expected = head?.gold || shown.expected;
    const judged = call ? judgements(head, call) : [];
    this.parting = h("p.card-parting", { hidden: true });
    fill(
      this.body,
      h(
        "div.card-head",
        null,
        h("h2", null, shown.title),
        h("span.badge", { class: tone }, words),
        h("span.spread"),
        shown.run ? h("a.small", { href: runAddress(shown.run) }, "open the run") : null,
      ),
      part("question", head?.question || shown.question || "The run was not stored."),
      part("expected", expected || "not given by the task", expected ? "" : "quiet"),
      part("answer", answer || shown.error || "no answer", answer ? tone : "bad"),
      head?.ending ? part("ended", head.ending, "quiet") : null,
      judged.length
        ? h(
            "div.card-part",
            null,
            h("h3", null, "judges and scores"),
            judged.map(({ where, values, text }) =>
              h("p.judged", null, h("b", null, where), ` ${values}`, text ? ` ${text}` : ""),
            ),
          )
        : null,
      this.parting,
    );
  }

  // The first turn at which this attempt and another one differ.
  async part(sibling) {
    const { shown, call, parting: place } = this;
    if (!sibling || !call) return;
    const [{ parting }, other] = await Promise.all([
      import("./difference.js"),
      get("/api/call", { key: sibling.run, id: "0" }),
    ]);
    if (this.shown !== shown && this.shown.run !== shown.run) return;
    const found = parting([call, other]);
    const choose = h(
      "select",
      {
        "aria-label": "the attempt to compare with",
        onchange: () => this.part(shown.siblings[choose.selectedIndex]),
      },
      shown.siblings.map((each) => h("option", { selected: each.run === sibling.run }, each.name)),
    );
    fill(
      place,
      found ? "Diverges from " : "Same turns as ",
      choose,
      found ? ` at turn ${found[0] + 1}: ${found[1]}. ` : " ",
      h(
        "a",
        { href: `#/compare/${encodeURIComponent(shown.run)}/${encodeURIComponent(sibling.run)}` },
        "word by word",
      ),
    );
    place.hidden = false;
  }

  // Keys of the page that shows the card.
  keys() {
    return {
      ...verdictKeys("label this answer and go to the next one:", this.said),
      n: ["write a note on this answer", () => this.note.focus()],
    };
  }
}

function part(name, text, tone = "") {
  return h(
    "div.card-part",
    null,
    h("h3", null, name),
    h("div.card-text", { class: tone, dir: "auto", tabindex: "0" }, text),
  );
}

// What judges and tasks said about a run, its first call and its turns.
function judgements(head, call) {
  const said = (where) => (mark) => ({
    where: `${mark.by}${where}`,
    values: Object.entries(mark.values)
      .map(([name, value]) => `${name} ${number(value)}`)
      .join(", "),
    text: textOf(mark.text),
  });
  const scores = Object.entries(head.rewards).map(([name, value]) => ({
    where: name,
    values: number(value),
    text: "",
  }));
  return [
    ...scores,
    ...head.marks.map(said("")),
    ...call.marks.map(said("")),
    ...call.turns.flatMap((turn) => turn.marks.map(said(`, turn ${turn.index + 1}`))),
  ];
}
