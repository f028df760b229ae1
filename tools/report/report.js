"use strict";

// The page is readable without this script, which adds sortable tables, paging of long contact sheets and enlarged
// pictures. Page texts are moved as nodes, never as HTML.

const CARDS_PER_PAGE = 24;
const ARROWS = { ArrowLeft: -1, ArrowRight: 1 };
const FEWEST_SMOOTH_PIXELS = 128; // smaller pictures are enlarged without smoothing

function create(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function createButton(content, act, attributes = {}) {
  const button = create("button", { type: "button", ...attributes }, ...content);
  button.addEventListener("click", act);
  return button;
}

// Previous, position, next. A button at its end is disabled, not removed, to keep the keyboard focus.
function createStepper(name, step) {
  const back = createButton(["Previous"], () => step(-1));
  const where = create("span", { role: "status" });
  const on = createButton(["Next"], () => step(1));
  const showPosition = (words, first, last) => {
    where.textContent = words;
    back.ariaDisabled = first;
    on.ariaDisabled = last;
  };
  return { bar: create("nav", { class: "stepper", "aria-label": name }, back, where, on), showPosition };
}

// Tables

function makeSortable(table) {
  for (const head of table.tHead.rows[0].cells) {
    head.append(createButton([...head.childNodes], () => sortBy(table, head)));
  }
}

function sortBy(table, head) {
  const upward = head.ariaSort !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
  head.ariaSort = upward ? "ascending" : "descending";
  const [body] = table.tBodies;
  const cellOf = (row) => row.cells[head.cellIndex];
  const rows = [...body.rows];
  const compare = rows.some((row) => "value" in cellOf(row).dataset) ? compareNumbers : compareTexts;
  body.append(...rows.sort((a, b) => compare(cellOf(a), cellOf(b), upward ? 1 : -1)));
}

// Cells without a number sort last in both directions.
function compareNumbers(a, b, sign) {
  const [x, y] = [a, b].map((cell) => parseFloat(cell.dataset.value));
  return isNaN(x) - isNaN(y) || (isNaN(x) ? 0 : sign * (x - y));
}

function compareTexts(a, b, sign) {
  return sign * a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
}

// Contact sheets and pictures

function showPixels(picture) {
  picture.classList.toggle("pixels", picture.naturalWidth < FEWEST_SMOOTH_PIXELS);
}

function pageSheet(sheet) {
  const cards = [...sheet.children];
  if (cards.length <= CARDS_PER_PAGE) return;
  let start = 0;
  const show = (from) => {
    if (from < 0 || from >= cards.length) return;
    start = from;
    const end = Math.min(from + CARDS_PER_PAGE, cards.length);
    cards.forEach((card, i) => (card.hidden = i < from || i >= end));
    showPosition(`${from + 1}–${end} of ${cards.length}`, from === 0, end === cards.length);
  };
  const { bar, showPosition } = createStepper(`Pages of ${sheet.ariaLabel ?? "the samples"}`, (way) => {
    show(start + way * CARDS_PER_PAGE);
    // The bar is sticky; paging from further down scrolls back to the top of the sheet.
    if (bar.getBoundingClientRect().top <= 0) frame.scrollIntoView();
  });
  const frame = create("div", { class: "paged" });
  sheet.replaceWith(frame);
  frame.append(bar, sheet);
  show(0);
}

function makeEnlargeable(sheet, enlarge) {
  const pictures = [...sheet.querySelectorAll("img")];
  for (const picture of pictures) {
    const button = createButton([], () => enlarge(pictures, picture), { class: "enlarge", "aria-haspopup": "dialog" });
    picture.replaceWith(button);
    button.append(picture);
  }
}

// Create one dialog for all sheets. Returns a function that opens it on a sheet's picture.
function createViewer() {
  let pictures = [];
  let at = 0;
  const large = create("img", { alt: "" });
  const facts = create("div", { class: "about" });
  const show = (place) => {
    if (!(place in pictures)) return;
    at = place;
    large.src = pictures[at].src;
    large.alt = dialog.ariaLabel = pictures[at].alt;
    const card = pictures[at].closest("li");
    facts.replaceChildren(...[...card.querySelectorAll("b, dl")].map((part) => part.cloneNode(true)));
    showPosition(`${at + 1} of ${pictures.length}`, at === 0, at === pictures.length - 1);
  };
  const { bar, showPosition } = createStepper("Pictures of this sheet", (way) => show(at + way));
  bar.append(createButton(["Close"], () => dialog.close(), { class: "close", autofocus: "" }));
  // The dialog has no padding, so a click on the dialog itself is a click outside its content.
  const dialog = create("dialog", {}, create("div", { class: "viewer" }, bar, large, facts));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("keydown", (event) => event.key in ARROWS && show(at + ARROWS[event.key]));
  large.addEventListener("load", () => showPixels(large));
  document.body.append(dialog);
  return (all, picture) => {
    pictures = all;
    show(pictures.indexOf(picture));
    dialog.showModal();
  };
}

for (const table of document.querySelectorAll("table")) makeSortable(table);
for (const picture of document.querySelectorAll(".picture img")) picture.decode().then(() => showPixels(picture));
const sheets = document.querySelectorAll(".sheet");
if (sheets.length) {
  const enlarge = createViewer();
  for (const sheet of sheets) {
    makeEnlargeable(sheet, enlarge);
    pageSheet(sheet);
  }
}
