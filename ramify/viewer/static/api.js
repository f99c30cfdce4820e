// Source of the page's data: the server, or the data inside an exported file.

import { h } from "./dom.js";

const holder = document.getElementById("ramify-data");
export const offline = holder ? JSON.parse(holder.textContent) : null;

// Parts that are loaded when they are needed; an exported file has them already.
export const optional = {};

export async function load(name) {
  if (!optional[name]) await import(`./${name}.js`);
  return optional[name];
}

const BEAT_MS = 4000; // the server is asked for a sign of life if it gave none for so long
const PATIENCE_MS = 8000; // without any answer, the server is gone, or hangs

export async function get(path, parameters = {}) {
  if (offline) return fromFile(path, parameters);
  const query = new URLSearchParams(parameters).toString();
  const address = query ? `${path}?${query}` : path,
    early = window.ramifyEarly;
  window.ramifyEarly = null;
  return answered(early && early.address === address ? early.answer : fetch(address));
}

export async function post(path, body) {
  if (offline) throw new Error("this file contains only one run: use ramify view to run it again");
  return answered(
    fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    }),
  );
}

// The JSON of a response; while it is late, the page says that the server does not answer.
async function answered(request) {
  const late = setTimeout(() => setConnected(false), PATIENCE_MS);
  let response, data;
  try {
    response = await request;
    data = await response.json().catch(() => ({}));
  } catch {
    setConnected(false);
    throw new Error("the viewer is not responding: was ramify view stopped?");
  } finally {
    clearTimeout(late);
  }
  setConnected(true);
  if (!response.ok) throw new Error(data.error?.message || `HTTP ${response.status}`);
  return data;
}

let heard = Date.now(); // when the server last gave a sign of life

// Asks for a sign of life while nothing else does. A server that hangs accepts connections and
// never answers, so only the time tells.
export function watchServer() {
  if (offline) return;
  setInterval(async () => {
    if (document.hidden || Date.now() - heard < BEAT_MS) return;
    const asking = new AbortController(),
      late = setTimeout(() => asking.abort(), PATIENCE_MS - BEAT_MS);
    try {
      const response = await fetch("/api/alive", { signal: asking.signal, cache: "no-store" });
      await response.arrayBuffer();
      setConnected(true);
    } catch {
      setConnected(false);
    } finally {
      clearTimeout(late);
    }
  }, BEAT_MS);
}

// Calls tell(message) for every change since `version()`, and returns a function that stops it. A
// hidden page does not follow; it receives what it missed when it is shown again.
export function follow(path, parameters, version, tell, ended) {
  if (offline) return () => {};
  let stream = null,
    done = false;
  const open = () => {
    if (stream || done || document.hidden) return;
    stream = new EventSource(
      `${path}?${new URLSearchParams({ ...parameters, version: version() })}`,
    );
    following++;
    showState();
    stream.onopen = () => setConnected(true);
    stream.onmessage = (event) => {
      setConnected(true);
      tell(JSON.parse(event.data));
    };
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
    if (stream) {
      stream.close();
      following--;
      showState();
    }
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
  showState();
  if (is) {
    heard = Date.now();
    known?.remove();
  } else if (!known)
    document
      .getElementById("top")
      .after(
        h(
          "div.connection",
          { id: "connection", role: "alert" },
          `The viewer has not responded since ${new Date(heard).toTimeString().slice(0, 8)}. The page may be out of date; retrying …`,
        ),
      );
}

let following = 0; // open streams of changes

// The connection in the bar: live (changes arrive as they happen), connected, or no response.
export function showState() {
  const badge = document.getElementById("state");
  if (!badge) return;
  const state = document.body.classList.contains("stale")
    ? "no response"
    : following
      ? "live"
      : "connected";
  badge.textContent = state;
  badge.className = `state ${state.replace(" ", "-")}`;
}

function fromFile(path, parameters) {
  if (path === "/api/matrix") return offline.matrix;
  if (path === "/api/run") return offline.picture;
  if (path === "/api/call") {
    const call = offline.calls[parameters.id];
    if (!call) throw new Error(`the run has no call ${parameters.id}`);
    return call;
  }
  if (path === "/api/provenance") return offline.provenance[parameters.id] || { links: [] };
  if (path === "/api/siblings") return offline.siblings[parameters.id];
  if (path === "/api/tokens") {
    const found = offline.tokens[`${parameters.id}/${parameters.turn}`];
    if (!found) throw new Error("this file does not contain the tokens");
    return found;
  }
  if (path === "/api/sources") return offline.sources;
  if (path === "/api/source") {
    const found = offline.cited[`${parameters.name}/${parameters.line}`];
    if (!found) throw new Error("this file contains only the cited lines of the sources");
    return found;
  }
  if (path === "/api/search") return searched(parameters.q.toLowerCase());
  throw new Error("this file contains only one run: use ramify view to see the rest");
}

function searched(needle) {
  const found = [];
  const look = (call, turn, where, value) => {
    const text = typeof value === "string" ? value : value ? value.text : "";
    const at = needle ? text.toLowerCase().indexOf(needle) : -1;
    if (at >= 0 && found.length < 200) {
      const start = Math.max(0, at - 60);
      found.push({
        call,
        turn,
        where,
        text: text.slice(start, at + needle.length + 60),
        at: at - start,
      });
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
