// Source of the page's data: the server, or the data inside an exported file.

import { h } from "./dom.js";

const holder = document.getElementById("ramify-data");
export const offline = holder ? JSON.parse(holder.textContent) : null;

export async function get(path, parameters = {}) {
  if (offline) return fromFile(path, parameters);
  const query = new URLSearchParams(parameters).toString();
  let response;
  const address = query ? `${path}?${query}` : path, early = window.ramifyEarly;
  window.ramifyEarly = null;
  try {
    response = await (early && early.address === address ? early.answer : fetch(address));
  } catch {
    setConnected(false);
    throw new Error("the viewer does not answer: was ramify view stopped?");
  }
  setConnected(true);
  const data = await response.json().catch(() => ({ error: `HTTP ${response.status}` }));
  if (!response.ok) throw new Error(data.error || `HTTP ${response.status}`);
  return data;
}

// Calls tell(message) for every change since `version()`, and returns a function that stops it. A
// hidden page does not follow; it receives what it missed when it is shown again.
export function follow(path, parameters, version, tell, ended) {
  if (offline) return () => {};
  let stream = null, done = false;
  const open = () => {
    if (stream || done || document.hidden) return;
    stream = new EventSource(`${path}?${new URLSearchParams({ ...parameters, version: version() })}`);
    stream.onopen = () => setConnected(true);
    stream.onmessage = (event) => tell(JSON.parse(event.data));
    stream.addEventListener("end", () => {
      done = true;
      close();
      if (ended) ended();
    });
    stream.onerror = () => {
      close();
      if (!done) setConnected(false);
      if (!done) setTimeout(open, 1000);
    };
  };
  const close = () => {
    if (stream) stream.close();
    stream = null;
  };
  const seen = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", seen);
  open();
  return () => {
    done = true;
    document.removeEventListener("visibilitychange", seen);
    close();
  };
}

// A banner while the server does not answer: what is shown may be old.
export function setConnected(is) {
  const known = document.getElementById("connection");
  document.body.classList.toggle("stale", !is);
  if (is) known?.remove();
  else if (!known) document.getElementById("top").after(h("div.connection", { id: "connection", role: "alert" }, `The viewer does not answer since ${new Date().toTimeString().slice(0, 8)}. What is shown may be out of date; trying again …`));
}

function fromFile(path, parameters) {
  if (path === "/api/run") return offline.picture;
  if (path === "/api/call") {
    const call = offline.calls[parameters.id];
    if (!call) throw new Error(`the run has no call ${parameters.id}`);
    return call;
  }
  if (path === "/api/provenance") return offline.provenance[parameters.id] || { links: [] };
  if (path === "/api/tokens") {
    const found = offline.tokens[`${parameters.id}/${parameters.turn}`];
    if (!found) throw new Error("this file holds no tokens");
    return found;
  }
  if (path === "/api/search") return searched(parameters.q.toLowerCase());
  throw new Error("this file holds one run alone; ramify view shows the rest");
}

function searched(needle) {
  const found = [];
  const look = (call, turn, where, value) => {
    const text = typeof value === "string" ? value : value ? value.text : "";
    const at = needle ? text.toLowerCase().indexOf(needle) : -1;
    if (at >= 0 && found.length < 200) {
      const start = Math.max(0, at - 60);
      found.push({ call, turn, where, text: text.slice(start, at + needle.length + 60), at: at - start });
    }
  };
  for (const call of Object.values(offline.calls)) {
    look(call.id, -1, "question", call.question);
    for (const turn of call.turns) {
      for (const message of turn.prompt) look(call.id, turn.index, message.role, message.content);
      look(call.id, turn.index, "reply", turn.reply.content);
      look(call.id, turn.index, "reasoning", turn.reply.reasoning);
      for (const cell of turn.cells) {
        look(call.id, turn.index, "output", cell.stdout);
        look(call.id, turn.index, "value", cell.value);
        look(call.id, turn.index, "error", cell.error);
      }
    }
    look(call.id, call.num_turns - 1, "answer", call.answer);
  }
  return { found, more: found.length === 200 };
}
