"use strict";
// What a reader does with a report: filter figures and panels, open parts of the appendix. The page is whole without it.
(() => {
  const folded = (text) => text.toLocaleLowerCase();

  for (const form of document.querySelectorAll("form.filter")) {
    form.hidden = false;
    const items = [...document.getElementById(form.dataset.of).querySelectorAll("[data-find]")];
    const count = form.querySelector("output");
    const apply = () => {
      const wanted = new FormData(form);
      const words = folded(wanted.get("text") || "").split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const item of items) {
        const fits = ["outcome", "class", "agreement"].every((tag) => !wanted.get(tag) || item.dataset[tag] === wanted.get(tag));
        const text = folded(item.dataset.find);
        item.hidden = !fits || !words.every((word) => text.includes(word));
        shown += !item.hidden;
      }
      count.textContent = `${shown} of ${items.length}`;
    };
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(apply));
    apply();
  }

  // one step of several at a time, by a slider
  let reach = () => {};
  const slider = document.querySelector("form.steps");
  if (slider) {
    const steps = [...document.querySelectorAll("[data-step]")];
    const { step, back, next, all } = slider.elements;
    const said = slider.querySelector("output");
    const show = (number, follow = true) => {
      step.value = number;
      const whole = all.getAttribute("aria-pressed") === "true";
      steps.forEach((section, index) => { section.hidden = !whole && index !== Number(step.value); });
      const section = steps[step.value];
      back.disabled = step.value === step.min;
      next.disabled = step.value === step.max;
      step.setAttribute("aria-valuetext", section.dataset.step);
      said.textContent = section.dataset.step;
      if (follow && (whole || section.getBoundingClientRect().top < 0)) section.scrollIntoView();
    };
    slider.hidden = false;
    slider.addEventListener("submit", (event) => event.preventDefault());
    step.addEventListener("input", () => show(step.value));
    back.addEventListener("click", () => show(Number(step.value) - 1));
    next.addEventListener("click", () => show(Number(step.value) + 1));
    all.addEventListener("click", () => {
      const whole = all.getAttribute("aria-pressed") !== "true";
      all.setAttribute("aria-pressed", whole);
      all.textContent = whole ? "One at a time" : "Show all";
      show(step.value);
    });
    reach = (target) => {
      const place = steps.findIndex((section) => section.contains(target));
      if (place >= 0) show(place, false);
    };
    show(0, false);
  }

  // a link into a closed part opens it
  function reveal() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    reach(target);
    for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    if (target) target.scrollIntoView();
  }
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => {  // the same link again, after the slider has moved on
    if (event.target.closest?.("a[href^='#']")?.hash === location.hash) reveal();
  });
  if (location.hash) reveal();

  // on a narrow screen the contents would fill the first page
  if (matchMedia("(max-width: 78rem)").matches) document.querySelector("nav.contents details").open = false;

  // an explanation stays within the window
  function fit(event) {
    const tip = event.target.classList?.contains("term") && event.target.querySelector(".tip");
    if (!tip || getComputedStyle(tip).position === "fixed") return;
    tip.style.left = `${Math.min(0, innerWidth - 24 - event.target.getClientRects()[0].left - tip.offsetWidth)}px`;
  }
  document.addEventListener("mouseover", fit);
  document.addEventListener("focusin", fit);

  // figures that were not scrolled to are missing on paper, and there is no time to decode them once printing begins
  const decode = () => {
    for (const image of document.querySelectorAll("img[loading=lazy]")) image.loading = "eager";
  };
  addEventListener("load", () => setTimeout(decode, 1500));
  addEventListener("beforeprint", decode);

  // Escape closes a term's explanation
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.activeElement.classList.contains("term")) document.activeElement.blur();
  });
})();
