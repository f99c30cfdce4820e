// A text that is cut off with an ellipsis has its whole text as its title, once it is pointed at.
// Which texts are cut depends on the width of the window, so nobody else needs to know them.

const MAX_TITLE = 2000; // characters

export function titleCutTexts() {
  addEventListener("pointerover", ({ target }) => {
    for (
      let it = target;
      it instanceof HTMLElement && it !== document.body;
      it = it.parentElement
    ) {
      const isOurs = "cut" in it.dataset;
      if (it.title && !isOurs) return;
      const words = cutWords(it);
      if (words) {
        it.dataset.cut = "";
        it.title = words.slice(0, MAX_TITLE);
        return;
      }
      if (isOurs) it.removeAttribute("title");
    }
  });
}

// The whole text of an element that may show only its beginning; otherwise empty.
function cutWords(it) {
  if (it instanceof HTMLSelectElement) return it.selectedOptions[0]?.text ?? "";
  if (it instanceof HTMLInputElement) return it.value ? "" : it.placeholder;
  const isCut = it.scrollWidth > it.clientWidth && getComputedStyle(it).textOverflow === "ellipsis";
  return isCut ? it.textContent : "";
}
