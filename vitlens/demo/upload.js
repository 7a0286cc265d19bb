// A file that is too large is refused before it is sent, with the page's own sentence; the server refuses it, too.
const most = Number(props.most);
const FILES = {
  change: (event) => event.target.files,
  drop: (event) => event.dataTransfer && event.dataTransfer.files,
  paste: (event) => event.clipboardData && event.clipboardData.files,
};
for (const [name, files] of Object.entries(FILES)) {
  document.addEventListener(name, (event) => {
    if (!event.target.closest || !event.target.closest("#upload")) return;
    const large = [...(files(event) || [])].find((file) => file.size > most);
    if (!large) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (name === "change") event.target.value = ""; // so that the same file, made smaller, can be chosen
    if (name === "drop") event.target.dispatchEvent(new DragEvent("dragleave", { bubbles: true }));
    trigger("refused", { bytes: large.size });
  }, true);
}
