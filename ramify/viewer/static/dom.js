// Creates elements from plain values. Text is always inserted as text: no module turns a string
// into HTML, and the page's Content-Security-Policy (require-trusted-types-for) makes the browser
// refuse it.

// h("button.small", { onclick, title: "x", "aria-label": "y" }, "text", node, [nodes], null)
export function h(what, properties, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element[name] = value;
    else if (name === "style")
      for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "class") element.classList.add(...value.split(" ").filter(Boolean));
    else if (name === "href") element.setAttribute("href", safeAddress(value));
    else element.setAttribute(name, value === true ? "" : value);
  }
  put(element, children);
  return element;
}

function put(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

// Allows only our own addresses: a fragment or a path of this server.
function safeAddress(address) {
  return /^(#|\/(?!\/))/.test(address) ? address : "#";
}

export function fill(element, ...children) {
  element.replaceChildren();
  put(element, children);
  return element;
}

let idle = 0;

// Announce a message to screen readers, and show it briefly.
export function toast(text) {
  let box = document.getElementById("toast");
  if (!box) {
    box = h("div", { id: "toast", role: "status" });
    document.body.append(box);
  }
  fill(box, text);
  box.classList.add("shown");
  clearTimeout(idle);
  idle = setTimeout(() => box.classList.remove("shown"), 1600);
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(`${what} copied`);
}
