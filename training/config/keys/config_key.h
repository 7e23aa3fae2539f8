#pragma once

// Internal: the table of a config's keys. The parser, tessera-config and docs/from_deepspeed.md have all that they know from it.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

enum class KeyType {
  kBoolean,
  kInteger, ///< also 2e8, and a text of it
  kNumber,
  kText,
  kNumbers, ///< a list
  kTexts,   ///< a list, or one
  kAny,     ///< what it may be is read where it is used; also a block of a program's own keys
  kBlock    ///< of keys of this table
};

enum class KeyEffect {
  kUsed,
  kNone,   ///< it is accepted and changes nothing, which a note says once
  kMissing ///< its meaning is not here: an error, unless it has the default, or is a block that is not enabled
};

/// What fills an "auto". Where a value is given as well, both must be equal, as in Hugging Face's Trainer.
enum class AutoFill {
  kNone,
  kMicroBatch,
  kAccumulation,
  kTrainBatch,
  kMaxGradNorm,
  kLearningRate,
  kBetas,
  kEpsilon,
  kWeightDecay,
  kNothing, ///< 0
  kWarmupSteps,
  kTotalSteps,
  kFp16,
  kBf16,
  kHiddenSize ///< it has no effect here
};

/// The stages of ZeRO that an option is for.
struct ZeroStages {
  int64_t first = 0, last = 3;
};

struct ConfigKey {
  std::string_view name; ///< with its blocks: "zero_optimization.stage"
  KeyType type;
  std::string_view standard; ///< the default, as JSON; empty: none
  KeyEffect effect;
  std::string_view here; ///< what it does here, or why it does nothing
  AutoFill filler = AutoFill::kNone;
  ZeroStages stages = {};
  std::string_view choices = {}; ///< of a text, between bars
};

/// DeepSpeed's keys, and those of the block "tessera".
std::span<const ConfigKey> deepspeed_keys();
std::span<const ConfigKey> tessera_keys();
/// The keys of the YAML that `accelerate config` writes.
std::span<const ConfigKey> accelerate_keys();

/// Null where there is none.
const ConfigKey* find_key(std::span<const ConfigKey> keys, std::string_view name);
/// Among DeepSpeed's and ours.
const ConfigKey* find_key(std::string_view name);

/// The values between the bars.
std::vector<std::string> choices_of(const ConfigKey& key);

/// "boolean", "integer".
std::string_view to_string(KeyType type);

/// ", did you mean …?" with the nearest of `names`, or nothing where none is near.
std::string nearest_name(std::string_view name, const std::vector<std::string>& names);

/// The names of the keys in a block, without it; "" for the keys on top.
std::vector<std::string> names_in(std::span<const ConfigKey> keys, std::string_view block);
/// Among DeepSpeed's and ours.
std::vector<std::string> names_in(std::string_view block);

/// Rows of Markdown: key, type, default, what it does here.
std::string markdown_table(std::span<const ConfigKey> keys);

} // namespace tessera::internal
