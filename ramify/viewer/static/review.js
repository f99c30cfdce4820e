// The review of a run: labels, a note and corrected scores. The server keeps it beside the journal.

import { post } from "./api.js";
import { fill, h, toast } from "./dom.js";
import { number } from "./format.js";

// Fills `holder` with the form; a second click empties it. saved(review) receives what was stored.
export function showReview(holder, head, saved) {
  if (holder.firstChild) return fill(holder);
  const { labels, note, rewards } = head.review,
    names = Object.keys({ ...head.rewards, ...rewards });
  const tags = h("input", {
    type: "text",
    "aria-label": "labels, separated by commas",
    placeholder: "labels: wrong unit, check again",
    value: labels.join(", "),
  });
  const text = h("textarea", { "aria-label": "note", placeholder: "note", rows: "2" });
  text.value = note;
  const scores = (names.length ? names : ["reward"]).map((name) => {
    const recorded = head.rewards[name];
    return [
      name,
      h("input", {
        type: "number",
        step: "any",
        "aria-label": `corrected ${name}`,
        placeholder: recorded === undefined ? "no score" : number(recorded),
        value: rewards[name] ?? "",
      }),
    ];
  });
  const problem = h("p.problem", { role: "alert", hidden: true });
  const save = async () => {
    const given = scores
      .filter(([, input]) => input.value.trim() !== "")
      .map(([name, input]) => [name, Number(input.value)]);
    try {
      const review = await post("/api/review", {
        key: head.key,
        labels: tags.value
          .split(",")
          .map((each) => each.trim())
          .filter(Boolean),
        note: text.value.trim(),
        rewards: Object.fromEntries(given),
      });
      fill(holder);
      toast("review saved");
      saved(review);
    } catch (error) {
      problem.hidden = false;
      problem.textContent = error.message;
    }
  };
  const submit = (event) => {
    event.preventDefault();
    save();
  };
  fill(
    holder,
    h(
      "form.review",
      { "aria-label": "review of this run", onsubmit: submit },
      h(
        "div.review-fields",
        null,
        h("label", null, "labels", tags),
        scores.map(([name, input]) => h("label.score", null, `corrected ${name}`, input)),
        h("label.wide-field", null, "note", text),
      ),
      h(
        "p.quiet",
        null,
        "Stored next to the journal, which is not changed. A corrected score replaces the recorded one in lists, filters and training data; leave the field empty to keep the recorded score.",
      ),
      problem,
      h("button.small", { type: "submit" }, "save"),
    ),
  );
  tags.focus();
}
