// An agent of the OpenAI Agents SDK for TypeScript: node agent.mjs ITEM_FILE.
import { readFileSync } from "node:fs";
import { Agent, run, tool } from "@openai/agents";
import { z } from "zod";

const boxes: Record<string, string> = { red: "copper", blue: "gold", green: "silver" };
const look = tool({
  name: "look",
  description: "Look into the red, blue or green box.",
  parameters: z.object({ box: z.string() }),
  execute: async ({ box }) => boxes[box] ?? "There is no such box.",
});
const agent = new Agent({
  name: "finder",
  instructions: "Look into the box. Then answer with the metal alone.",
  tools: [look],
  model: "policy",
});
const item = JSON.parse(readFileSync(process.argv[2], "utf8"));
console.log((await run(agent, item.question, { maxTurns: 5 })).finalOutput);
