// Running again from a turn: an edited prompt or edited code, what the new run may cost, and its
// start.

import { get, post } from "./api.js";
import { fill, h, toast } from "./dom.js";
import { count, dollars, grouped, runAddress } from "./format.js";

const PAUSE_MS = 400; // after a key, before the cost of the edit is requested

// Fills `holder` with the form of a turn; a second click empties it.
export async function showAgain(holder, key, call, turn) {
  if (holder.firstChild) return fill(holder);
  fill(holder, h("p.quiet", null, "Loading …"));
  try {
    const place = await get("/api/again", { key, id: call, turn });
    fill(holder, new AgainForm(place, { key, call, turn }).element);
  } catch (error) {
    fill(holder, h("p.problem", { role: "alert" }, error.message));
  }
}

class AgainForm {
  constructor(place, where) {
    this.place = place;
    this.where = where;
    this.checks = 0; // requests for the cost; only the answer to the last one is shown
    this.texts = place.messages.map(({ role, text }) => this.area(text, `edited ${role} message`));
    this.code = place.code === null ? null : this.area(place.code, "edited code");
    this.what = h(
      "select",
      { "aria-label": "what to edit", onchange: () => this.draw() },
      h("option", { value: "prompt" }, "edit the prompt"),
      this.code ? h("option", { value: "code" }, "edit the code") : null,
    );
    this.most = h("input", {
      type: "number",
      min: "0",
      step: "any",
      "aria-label": "maximum cost in dollars",
      value: place.estimate.max_cost ?? "",
      oninput: () => this.later(),
    });
    this.fields = h("div.again-fields");
    // Asked for when it is sent, kept in this form alone, and cleared once it was sent.
    this.keys = place.keys.map(({ model, variable }) => ({
      model,
      input: h("input", {
        type: "password",
        autocomplete: "off",
        "aria-label": `API key for ${model}`,
        placeholder: variable,
      }),
    }));
    this.keyFields = h(
      "div.again-keys",
      { hidden: true },
      h(
        "p",
        null,
        `The environment of ramify view has no ${place.keys.map(({ variable }) => variable).join(" and no ")}. `,
        "The key is used for this run only and is not stored.",
      ),
      this.keys.map(({ model, input }) => h("label", null, h("b", null, model), input)),
    );
    this.cost = h("p.again-cost", { role: "status" });
    this.start = h("button.small.go", { type: "button", onclick: () => this.run() });
    this.element = h(
      "form.again",
      { "aria-label": "run again from this turn", onsubmit: (event) => event.preventDefault() },
      h(
        "div.strip-tools",
        null,
        this.what,
        place.estimate.max_cost === null ? null : h("label", null, "maximum cost $", this.most),
      ),
      this.fields,
      this.cost,
      this.keyFields,
      this.start,
    );
    this.draw();
  }

  area(text, label) {
    const area = h("textarea", {
      "aria-label": label,
      spellcheck: "false",
      rows: String(Math.min(16, text.split("\n").length + 1)),
      oninput: () => this.later(),
    });
    area.value = text;
    return area;
  }

  draw() {
    if (this.what.value === "code") fill(this.fields, this.code);
    else
      fill(
        this.fields,
        this.texts.map((area, index) =>
          h("label", null, h("b", null, this.place.messages[index].role), area),
        ),
      );
    this.check();
  }

  later() {
    clearTimeout(this.timer);
    this.start.disabled = true;
    this.timer = setTimeout(() => this.check(), PAUSE_MS);
  }

  // What the server needs: only what was changed.
  body() {
    const texts = this.texts.map((area) => area.value),
      most = this.most.value.trim();
    const edit =
      this.what.value === "code"
        ? { code: this.code.value }
        : texts.some((text, index) => text !== this.place.messages[index].text)
          ? { prompt: texts }
          : {};
    return {
      ...this.where,
      ...edit,
      ...(most && Number(most) !== this.place.max_cost ? { max_cost: Number(most) } : {}),
    };
  }

  async check() {
    const number = ++this.checks;
    this.start.disabled = true;
    try {
      const cost = await post("/api/again/cost", this.body());
      if (number === this.checks) this.say(cost);
    } catch (error) {
      if (number === this.checks) fill(this.cost, h("span.problem", null, error.message));
    }
  }

  say(cost) {
    const most =
      cost.max_cost === null
        ? `at most ${count(cost.max_tokens)} tokens (price unknown)`
        : `at most ${dollars(cost.max_cost)}`;
    fill(
      this.cost,
      `The new run costs ${most} and makes at most ${grouped(cost.max_calls)} requests. `,
      cost.recorded_cost === null
        ? null
        : `From this turn on, the recorded run spent ${dollars(cost.recorded_cost)}. `,
      cost.input_tokens === null
        ? "The code runs first; "
        : `The prompt takes up about ${grouped(cost.input_tokens)} of the ${grouped(cost.window)} tokens in the context window of ${cost.model}; `,
      "everything before this turn is replayed from the recorded run and costs nothing.",
    );
    fill(this.start, `run again (${most})`.replace(" (price unknown)", ""));
    this.start.disabled = false;
  }

  // The keys that were typed, or null after asking for one that is missing.
  givenKeys() {
    const lacking = this.keys.find(({ input }) => !input.value.trim());
    if (!lacking)
      return Object.fromEntries(this.keys.map(({ model, input }) => [model, input.value.trim()]));
    this.keyFields.hidden = false;
    lacking.input.focus();
    return null;
  }

  async run() {
    const keys = this.givenKeys();
    if (!keys) return;
    this.start.disabled = true;
    try {
      const { key } = await post("/api/again", {
        ...this.body(),
        ...(this.keys.length ? { keys } : {}),
      });
      for (const { input } of this.keys) input.value = "";
      toast("the new run has started");
      location.hash = runAddress(key);
    } catch (error) {
      fill(this.cost, h("span.problem", { role: "alert" }, error.message));
      this.start.disabled = false;
    }
  }
}
