// Names and tab stops that the theme omits, for screen readers and keyboards. The theme adds some elements when they come
// into view, so this watches for them.
const complete = () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(":is(.md-typeset__scrollwrap, math[display=block]):not([tabindex])").forEach((element) => {
    element.setAttribute("tabindex", "0"); // a wide table or formula scrolls
  });
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((element) => {
    element.setAttribute("aria-label", `Copy ${element.parentElement.id}`); // a landmark needs a name of its own
  });
};
new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
complete();
