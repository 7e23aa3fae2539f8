#pragma once

// Internal: the values of a config's keys.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/bytes/json.h>
#include <tessera/fsdp/strategy.h>
#include <tessera/training/config/keys/config_key.h>
#include <tessera/training/config/values/auto_arguments.h>
#include <tessera/training/train_arguments.h>

namespace tessera::internal {

/// The keys that a file gives, with their full names, in the types of the table; all others have the table's defaults.
class ConfigValues {
 public:
  /// Errors: an unknown key, with the nearest; a value of another type; an option of another stage; what is missing here; an
  /// "auto" that nothing fills; values that differ from the arguments, all of them at once.
  ConfigValues(const Json& root, const TrainArguments& arguments, std::string source);

  const std::string& source() const { return source_; }
  /// In the file; of a block too.
  bool has(const std::string& key) const { return values_.count(key) != 0 || blocks_.count(key) != 0; }
  /// Null where there is no default.
  Json json(const std::string& key) const;
  bool boolean(const std::string& key) const { return json(key).get<bool>(); }
  int64_t integer(const std::string& key) const { return json(key).get<int64_t>(); }
  double number(const std::string& key) const { return json(key).get<double>(); }
  std::string text(const std::string& key) const { return json(key).get<std::string>(); }
  std::vector<std::string> texts(const std::string& key) const { return json(key).get<std::vector<std::string>>(); }
  std::optional<int64_t> optional_integer(const std::string& key) const { return optional<int64_t>(key); }
  std::optional<double> optional_number(const std::string& key) const { return optional<double>(key); }
  std::optional<std::string> optional_text(const std::string& key) const { return optional<std::string>(key); }

  /// The stage of ZeRO; that of `tessera.strategy`, where only this is given.
  int64_t stage() const;

  /// The keys of the file, in order.
  const std::map<std::string, Json>& given() const { return values_; }
  /// What filled an "auto", by key.
  const std::map<std::string, std::string>& filled() const { return filled_; }
  std::vector<std::string>& notes() { return notes_; }

  /// "ds.json: fp16.hysteresis".
  std::string where(const std::string& key) const { return source_ + ": " + key; }

 private:
  template <typename T>
  std::optional<T> optional(const std::string& key) const {
    const auto value = json(key);
    return value.is_null() ? std::nullopt : std::optional<T>(value.get<T>());
  }
  void check_types(const Json& root) const;
  void add_block(const Json& block, const std::string& name);
  void add(const ConfigKey& key, const Json& value);
  void fill(const TrainArguments& arguments);
  /// What a key of the file itself says of it.
  void fill_from_file(AutoFill filler, Filling& filling) const;
  /// Gives an "auto" its value. False where the key is to be left out, for its default or the batch's arithmetic, or, told in
  /// `unfilled`, because nothing fills it.
  bool fill_auto(const ConfigKey& key, const Filling& filling, Json& value, std::vector<std::string>& unfilled);
  void check_stages() const;
  void check_effects();

  std::string source_;
  std::map<std::string, Json> values_;
  std::map<std::string, std::string> filled_;
  std::set<std::string> blocks_;
  std::vector<std::string> notes_;
};

/// The stage of ZeRO that splits as much inside a group of ranks.
int64_t stage_of(Strategy strategy);

/// The default of a key; null where it has none.
Json standard_of(const ConfigKey& key);

/// Whether a value asks for nothing: the default, null, false, and a block that is empty or not enabled.
bool is_off(const ConfigKey& key, const Json& value);

/// The value as the type of the key, from what pydantic takes for it: "true" and "on", 2e8 and "5". An error that names `where`.
Json as_type(const ConfigKey& key, const Json& value, const std::string& where);

} // namespace tessera::internal
