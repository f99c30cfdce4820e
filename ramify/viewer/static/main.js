// Routing by the address after #, the bar at the top, and the keys and colors of all pages.
//
//   #/                        runs          #/run/KEY[/call/ID[/turn/N]]    one run
//   #/runs/FILTER[/at/KEY]                    runs, scrolled to one of them
//   #/training[/KEY[/OTHER]]  training      #/compare[/KEY[/OTHER…]][/call/ID]      two or more runs
//   #/run/KEY/report                          one run to read or print
//   #/evaluation[/KEY[/OTHER]][?…]          evaluations, and one of them
//   #/matrix/KEY                              a matrix of evaluations
//   #/label[/FILTER][?at=KEY]               runs to label, one after the other
//   #/map[/KEY[/FILTER]]                    maps, and the rows of one

import { load, offline, showState, watchServer } from "./api.js";
import { titleCutTexts } from "./cut_text.js";
import { fill, h, toast } from "./dom.js";
import { runAddress } from "./format.js";
import { runPage } from "./run.js";

let page = document.getElementById("page");
const bar = document.getElementById("top");
let view = null,
  shown = "",
  turning = 0;

const PAGES = [
  ["#/", "Runs"],
  ["#/training", "Training"],
  ["#/evaluation", "Evaluations"],
  ["#/map", "Maps"],
  ["#/compare", "Compare"],
];

function readRoute() {
  const [path, query] = location.hash.split("?", 2),
    parts = path.replace(/^#\/?/, "").split("/").map(decoded);
  const route = {
    query: new URLSearchParams(query || ""), // what a page keeps in its address
    name: parts[0] || (offline ? (offline.matrix ? "matrix" : "run") : "runs"),
    keys: parts.slice(1).filter(Boolean),
    call: null,
    turn: null,
  };
  if (route.name === "run") {
    route.keys = [offline ? offline.picture.head.key : parts[1] || ""];
    if (parts[2] === "report") route.name = "report";
    if (parts[2] === "call") route.call = parts[3];
    if (parts[4] === "turn") route.turn = Math.max(0, Number(parts[5]) - 1) || 0;
  }
  if (route.name === "runs") route.keys = parts.slice(1); // the filter may be empty
  const at = parts.indexOf("call", 2);
  if (route.name === "compare" && at > 0)
    [route.call, route.keys] = [parts[at + 1], parts.slice(1, at)];
  return route;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function turn() {
  const route = readRoute(),
    name = `${route.name} ${route.keys.join(" ")}`,
    number = ++turning;
  drawBar(route);
  if (name === shown && view && view.show) return view.show(route);
  if (view?.close) view.close();
  view = null;
  shown = name;
  document.body.dataset.page = route.name;
  const own = ownPage();
  try {
    const made = await open(route, own);
    if (number === turning) view = made;
    else if (made?.close) made.close();
  } catch (error) {
    fill(
      own,
      h(
        "div.pad",
        null,
        h("h1", null, "This page cannot be shown"),
        h("p.problem", { role: "alert" }, error.message),
        offline ? null : h("p", null, h("a", { href: "#/" }, "all runs")),
      ),
    );
  }
}

// A new element for the next page, with what is shown until it is drawn. One that comes late draws
// into an element that has left the document.
function ownPage() {
  const next = /** @type {HTMLElement} */ (page.cloneNode(false));
  next.append(...page.childNodes);
  page.replaceWith(next);
  page = next;
  return next;
}

async function open(route, page) {
  if (route.name === "run") return runPage(page, route.keys[0], route);
  if (route.name === "report") return (await load("report"))(page, route.keys);
  if (route.name === "matrix") return (await load("matrix"))(page, route.keys);
  if (offline) throw new Error("this file contains only one run");
  if (route.name === "training")
    return (await import("./training.js")).trainingPage(page, route.keys);
  if (route.name === "evaluation")
    return (await import("./evaluation.js")).evaluationPage(page, route.keys, route.query);
  if (route.name === "label")
    return (await import("./label.js")).labelPage(page, route.keys, route.query);
  if (route.name === "map") return (await import("./map.js")).mapPage(page, route.keys);
  if (route.name === "compare")
    return (await import("./compare.js")).comparePage(page, route.keys, route);
  if (route.name === "runs") return (await import("./runs.js")).runsPage(page, route.keys);
  throw new Error(`unknown page: ${route.name}`);
}

function drawBar(route) {
  const links = offline ? [["#/", offline.matrix ? "Matrix" : "Run"]] : PAGES;
  const here = {
    runs: "Runs",
    run: offline ? "Run" : "",
    training: "Training",
    evaluation: "Evaluations",
    matrix: offline ? "Matrix" : "Evaluations",
    map: "Maps",
    compare: "Compare",
  }[route.name];
  fill(
    bar,
    h(
      "a.brand",
      { href: offline?.picture ? runAddress(offline.picture.head.key) : "#/" },
      "ramify",
    ),
    h(
      "nav",
      { "aria-label": "pages" },
      links.map(([href, name]) =>
        h("a", { href, "aria-current": name === here ? "page" : null }, name),
      ),
    ),
    h("span.spread"),
    offline ? null : h("span.state", { id: "state", role: "status" }),
    h(
      "button.small.share-button",
      { type: "button", onclick: share, "aria-label": "share", title: "share (S)" },
      h("span", null, "share"),
    ),
    h(
      "button.small",
      {
        type: "button",
        onclick: otherTheme,
        "aria-label": "dark or light",
        title: "dark or light (t)",
      },
      "◐",
    ),
    h(
      "button.small",
      { type: "button", onclick: help, "aria-label": "keys", title: "keyboard shortcuts (?)" },
      "?",
    ),
  );
  showState();
}

// --- dark and light ------------------------------------------------------------------------------

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  dispatchEvent(new Event("ramify-theme"));
}

function otherTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
  try {
    localStorage.setItem("ramify-theme", dark ? "light" : "dark");
  } catch {
    // A local file, or a browser without storage: the choice lasts for this page only.
  }
}

function storedTheme() {
  try {
    return localStorage.getItem("ramify-theme");
  } catch {
    return null;
  }
}

// --- keys ----------------------------------------------------------------------------------------

let goes = false;

function pageKeys() {
  return {
    t: ["dark or light", otherTheme],
    S: ["share this page", share],
    "?": ["keyboard shortcuts", help],
    ...(offline
      ? {}
      : {
          "g r": ["runs", () => (location.hash = "#/")],
          "g t": ["training", () => (location.hash = "#/training")],
          "g e": ["evaluations", () => (location.hash = "#/evaluation")],
          "g m": ["maps", () => (location.hash = "#/map")],
          "g c": ["compare", () => (location.hash = "#/compare")],
        }),
    ...(view?.keys ? view.keys() : {}),
  };
}

async function share() {
  const known = /** @type {HTMLDialogElement | null} */ (document.getElementById("share"));
  if (known) return known.close();
  try {
    await (await load("share"))(view);
  } catch (error) {
    toast(error.message);
  }
}

function help() {
  const known = /** @type {HTMLDialogElement | null} */ (document.getElementById("help"));
  if (known) return known.close();
  const dialog = h(
    "dialog",
    { id: "help", "aria-label": "keys" },
    h("h2", null, "Keyboard shortcuts"),
    h(
      "dl.keys",
      null,
      Object.entries(pageKeys()).map(([key, [words]]) =>
        h("div", null, h("dt", null, h("kbd", null, key)), h("dd", null, words)),
      ),
    ),
    h("button.small", { type: "button", onclick: () => dialog.close() }, "close"),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.key === "Escape" && document.activeElement instanceof HTMLElement)
    document.activeElement.blur();
  if (event.target instanceof Element && event.target.closest("input, select, textarea, dialog"))
    return;
  const keys = pageKeys(),
    name = goes ? `g ${event.key}` : event.key;
  goes = event.key === "g" && !goes;
  const found = keys[name];
  if (!found) return;
  event.preventDefault();
  found[1]();
});

addEventListener("hashchange", turn);
titleCutTexts();
setTheme(storedTheme());
turn();
watchServer();
