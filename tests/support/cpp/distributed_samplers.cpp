// Runs scripts over the distributed samplers of torch's C++ front end and prints what they answer.
//
// Each line of standard input is one script: KIND SIZE NUM_REPLICAS RANK ALLOW_DUPLICATES STEP..., where a step is
//   nK  next(K): the indices, comma-separated, or "none"      hK  the same as COUNT:HASH, for long batches
//   r   reset()          rK  reset(K)       eK  set_epoch(K)       i   nothing
//   s   save             l   load what was last saved             wPATH  save into a file
// and the answer of every step but n and h is INDEX@EPOCH after it. One line of answers comes back for each script.
// The Python side, and what the hash is, stand in tests/oracle_cpp_samplers.py.

#include <torch/data/samplers/distributed.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

using Indices = std::optional<std::vector<size_t>>;

static std::string listed(const Indices& batch) {
  if (!batch) return "none";
  std::string text;
  for (size_t index : *batch) text += (text.empty() ? "" : ",") + std::to_string(index);
  return "[" + text + "]";
}

static std::string hashed(const Indices& batch) {
  if (!batch) return "none";
  uint64_t hash = 0;
  for (size_t index : *batch) hash = hash * 31 + index;
  return std::to_string(batch->size()) + ":" + std::to_string(hash);
}

template <typename Sampler>
static std::string answer(Sampler& sampler, const std::string& step, std::string& saved) {
  const std::string argument = step.substr(1);
  switch (step[0]) {
    case 'n': return listed(sampler.next(std::stoull(argument)));
    case 'h': return hashed(sampler.next(std::stoull(argument)));
    case 'e': sampler.set_epoch(std::stoull(argument)); break;
    case 'r': argument.empty() ? sampler.reset() : sampler.reset(std::stoull(argument)); break;
    case 's': case 'w': {
      torch::serialize::OutputArchive archive;
      sampler.save(archive);
      std::ostringstream stream;
      archive.save_to(stream);
      saved = stream.str();
      if (step[0] == 'w') archive.save_to(argument);
      break;
    }
    case 'l': {
      torch::serialize::InputArchive archive;
      std::istringstream stream(saved);
      archive.load_from(stream);
      sampler.load(archive);
      break;
    }
  }
  return std::to_string(sampler.index()) + "@" + std::to_string(sampler.epoch());
}

template <typename Sampler>
static void run(std::istringstream& script) {
  size_t size, num_replicas, rank;
  bool allow_duplicates;
  script >> size >> num_replicas >> rank >> allow_duplicates;
  Sampler sampler(size, num_replicas, rank, allow_duplicates);
  std::string step, saved;
  while (script >> step) std::cout << answer(sampler, step, saved) << ' ';
  std::cout << '\n';
}

int main() {
  std::string line, kind;
  while (std::getline(std::cin, line)) {
    std::istringstream script(line);
    script >> kind;
    if (kind == "random") run<torch::data::samplers::DistributedRandomSampler>(script);
    else run<torch::data::samplers::DistributedSequentialSampler>(script);
  }
}
