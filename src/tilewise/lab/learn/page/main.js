// Puts the page's data into its parts.

import { byId } from "./elements.js";
import { backwardPart } from "./backward.js";
import { cachePart } from "./cache.js";
import { eightPart } from "./eight.js";
import { memoryPart } from "./memory.js";
import { onlinePart } from "./online.js";
import { pipelinePart } from "./pipeline.js";
import { tilesPart } from "./tiles.js";
import { walkInputs } from "./walk_inputs.js";

const data = JSON.parse(byId("data").textContent);
const showTiles = tilesPart(), showBackward = backwardPart(data);
walkInputs(data.examples, (given) => {
  showTiles(given);
  showBackward(given);
});
onlinePart(data.examples.filter((example) => example.query.length === 1));
memoryPart(data);
pipelinePart(data);
cachePart(data);
eightPart(data);
document.querySelectorAll("form").forEach((form) => form.addEventListener("submit", (event) => event.preventDefault()));
byId("made").textContent = data.made;
