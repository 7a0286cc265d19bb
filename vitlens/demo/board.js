// Heads and patches that are switched off by mouse, touch or keyboard; the server is told what is off after each change.
const pressed = (button) => button.getAttribute("aria-pressed") === "true";
const press = (button, off) => button.setAttribute("aria-pressed", String(off));
const all = (what) => [...element.querySelectorAll(what)];

function tell() {
  trigger("switched", {
    board: element.querySelector("[data-board]").dataset.board,
    heads: all("[data-head]").filter(pressed).map((button) => button.dataset.head.split(".").map(Number)),
    patches: all("[data-patch]").filter(pressed).map((button) => Number(button.dataset.patch)),
  });
}

// ---- patches are painted: the first one that is touched decides whether the stroke switches off or on
let off = null, changed = false;
function paint(target) {
  const patch = target && target.closest && target.closest("[data-patch]");
  if (!patch || !element.contains(patch) || pressed(patch) === off) return;
  press(patch, off);
  changed = true;
}
element.addEventListener("pointerdown", (event) => {
  const patch = event.target.closest("[data-patch]");
  if (!patch) return;
  event.preventDefault();
  if (patch.hasPointerCapture(event.pointerId)) patch.releasePointerCapture(event.pointerId);
  off = !pressed(patch);
  changed = false;
  paint(patch);
});
element.addEventListener("pointermove", (event) => {
  if (off !== null) paint(document.elementFromPoint(event.clientX, event.clientY));
});
for (const name of ["pointerup", "pointercancel"]) {
  window.addEventListener(name, () => {
    if (off === null) return;
    off = null;
    if (changed) tell();
  });
}

// ---- heads, whole layers, and everything on
element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.head !== undefined) press(button, !pressed(button));
  else if (button.dataset.patch !== undefined && event.detail === 0) press(button, !pressed(button)); // by keyboard
  else if (button.dataset.layer !== undefined) {
    const heads = [...button.parentElement.querySelectorAll("[data-head]")];
    const some = heads.some((head) => !pressed(head));
    for (const head of heads) press(head, some);
  } else if (button.dataset.reset !== undefined) {
    for (const each of all("[aria-pressed=true]")) press(each, false);
  } else return;
  tell();
});

// ---- the words of the head that is pointed at, or focused
for (const name of ["pointerover", "focusin"]) {
  element.addEventListener(name, (event) => {
    const head = event.target.closest("[data-head]");
    if (head) element.querySelector("[data-words]").textContent = head.title;
  });
}

// ---- arrow keys move within a grid
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
element.addEventListener("keydown", (event) => {
  const step = STEPS[event.key], button = event.target.closest("[data-at]");
  if (!step || !button) return;
  event.preventDefault();
  const [row, column] = button.dataset.at.split(",").map(Number);
  const kind = button.dataset.head === undefined ? ".vl-patch" : ".vl-head";
  const next = element.querySelector(`${kind}[data-at="${row + step[0]},${column + step[1]}"]`);
  if (!next) return;
  button.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
