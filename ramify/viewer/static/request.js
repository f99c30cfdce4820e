// The exact request of one turn: all its messages, and the same as JSON or curl.

import { get, offline } from "./api.js";
import { copy, fill, h } from "./dom.js";
import { grouped } from "./format.js";

// Fills `holder` with the request of a turn; a second click empties it.
export async function showRequest(holder, key, call, turn) {
  if (holder.firstChild) return fill(holder);
  if (offline) return fill(holder, h("p.note", null, "this file does not contain full requests"));
  fill(holder, h("p.quiet", null, "Loading …"));
  try {
    const {
      body,
      endpoint,
      key_variable: variable,
    } = await get("/api/request", { key, id: call, turn });
    const json = JSON.stringify(body, null, 2),
      choose = (which) =>
        fill(
          shown,
          which === "messages" ? messagesOf(body.messages) : h("pre.said", { tabindex: "0" }, json),
        );
    const shown = h("div.request-body");
    const pick = h(
      "select",
      { "aria-label": "how the request is shown", onchange: () => choose(pick.value) },
      [
        ["messages", "exact prompt"],
        ["json", "JSON"],
      ].map(([value, name]) => h("option", { value }, name)),
    );
    fill(
      holder,
      h(
        "div.strip-tools",
        null,
        pick,
        h("button.small", { type: "button", onclick: () => copy(json, "request") }, "copy JSON"),
        h(
          "button.small",
          { type: "button", onclick: () => copy(curlOf(body, endpoint, variable), "curl command") },
          "copy curl",
        ),
        h(
          "span.quiet",
          null,
          `${grouped(body.messages.length)} messages, ${grouped(json.length)} characters; rebuilt from the journal as a chat request`,
        ),
      ),
      shown,
    );
    choose("messages");
  } catch (error) {
    fill(holder, h("p.problem", null, error.message));
  }
}

function messagesOf(messages) {
  return messages.map((message) =>
    h(
      "section",
      { "aria-label": message.role },
      h("h3", null, message.role),
      h("pre.said", { tabindex: "0" }, message.content ?? ""),
    ),
  );
}

// The key stays in the environment.
function curlOf(body, endpoint, variable) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${endpoint} -H "Authorization: Bearer $${variable}" -H 'Content-Type: application/json' -d '${quoted}'`;
}
