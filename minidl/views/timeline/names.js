// The lanes' names and colours.

function drawNames(bottom) {
  pen.fillStyle = look.paper; pen.fillRect(0, AXIS, gutter, bottom - AXIS);
  let slot = -1;
  for (const lane of lanes) {
    if (lane.hidden) continue;
    const y = yOf(lane.top) + tall(lane) * row / 2;
    if (words.slots.length > 1 && lane.slot !== slot) {
      write(words.slots[lane.slot], 10, yOf(lane.top) - 11, look.ink, "left", "600 11.5px");
      slot = lane.slot;
    }
    const small = ["feeder", "queue_feeders", "epochs"].includes(lane.kind);
    if (lane.actor >= 0) { pen.fillStyle = actorColour(lane.actor); pen.fillRect(gutter - 5, yOf(lane.top), 4, tall(lane) * row); }
    if (lane.closed) write(lane.title, gutter - 10, y, look.faint, "right", `${Math.min(11, row * CLOSED)}px`);
    else write(lane.title, gutter - 10, y, small ? look.faint : look.ink, "right", small ? "10.5px" : "600 12px");
    if (["worker", "loader"].includes(lane.kind)) write(lane.closed ? "▸" : "▾", 4, y, look.faint, "left", "9px");
  }
}

function slotColour(slot) { return words.slots.length > 1 ? actorColour(slot) : look.faint; }
function actorColour(actor) { return ACTORS[actor % ACTORS.length]; }
