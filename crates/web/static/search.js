// Searches the documentation. Its index is fetched when somebody begins to type, from beside the pages.

const top = document.querySelector("script[data-top]").dataset.top;
const words = document.getElementById("words");
const found = document.getElementById("found");
const count = document.getElementById("count");
const MOST = 12;
let sections;

async function search() {
  sections ??= (await (await fetch(`${top}search.json`)).json()).map((section) => ({
    ...section,
    heads: `${section.page} ${section.heading}`.toLowerCase(),
    all: `${section.page} ${section.heading} ${section.text}`.toLowerCase(),
  }));
  const wanted = words.value.toLowerCase().split(/\s+/).filter((word) => word.length > 1);
  const rank = (section) => wanted.reduce((sum, word) => sum + (section.heads.includes(word) ? 10 : 0) + Math.min(section.all.split(word).length, 5), 0);
  const hits = wanted.length === 0 ? [] : sections.filter((section) => wanted.every((word) => section.all.includes(word)));
  hits.sort((one, other) => rank(other) - rank(one));
  found.replaceChildren(...hits.slice(0, MOST).map((section) => {
    const link = document.createElement("a");
    link.href = top + section.to;
    link.textContent = section.heading;
    const page = document.createElement("small");
    page.textContent = section.heading === section.page ? "" : section.page;
    const item = document.createElement("li");
    item.append(link, page);
    return item;
  }));
  count.textContent = wanted.length === 0 ? "" : `${hits.length} found`;
}

// Pages that are opened as files cannot fetch the index, and do without the search.
if (location.protocol !== "file:") document.getElementById("search").hidden = false;
words.addEventListener("input", search);
document.getElementById("search").addEventListener("submit", (event) => {
  event.preventDefault();
  found.querySelector("a")?.click();
});
