#include <ATen/TensorGeometry.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/formats/archived_tensor.h>
#include <tessera/dtensor/layout/box.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <utility>

namespace tessera::internal {

namespace {

using caffe2::serialize::PyTorchStreamReader;

struct PythonDtype {
  std::string_view name;
  at::ScalarType dtype;
};

constexpr std::array<PythonDtype, 19> kPythonDtypes{{
    {"torch.uint8", at::kByte},
    {"torch.int8", at::kChar},
    {"torch.int16", at::kShort},
    {"torch.int32", at::kInt},
    {"torch.int64", at::kLong},
    {"torch.float16", at::kHalf},
    {"torch.float32", at::kFloat},
    {"torch.float64", at::kDouble},
    {"torch.bfloat16", at::kBFloat16},
    {"torch.bool", at::kBool},
    {"torch.complex64", at::kComplexFloat},
    {"torch.uint16", at::kUInt16},
    {"torch.uint32", at::kUInt32},
    {"torch.uint64", at::kUInt64},
    {"torch.float8_e4m3fn", at::kFloat8_e4m3fn},
    {"torch.float8_e5m2", at::kFloat8_e5m2},
    {"torch.float8_e4m3fnuz", at::kFloat8_e4m3fnuz},
    {"torch.float8_e5m2fnuz", at::kFloat8_e5m2fnuz},
    {"torch.float8_e8m0fnu", at::kFloat8_e8m0fnu},
}};

// Finds the dtype of "torch.FloatStorage" and others.
at::ScalarType dtype_of_storage(const std::string& storage_class, const std::string& what) {
  const auto* found = std::ranges::find_if(kPythonDtypes, [&](const PythonDtype& each) {
    return storage_class == c10::str("torch.", c10::toString(each.dtype), "Storage");
  });
  TORCH_CHECK(found != kPythonDtypes.end(), what, " is stored in ", storage_class, ", which is not supported");
  return found->dtype;
}

// Python stores such a view as the data that it looks at, and says so in the last argument, which others lack.
void check_is_no_view(const std::vector<PickleRef>& arguments, size_t metadata, const std::string& what) {
  if (arguments.size() <= metadata || std::get_if<PickleNone>(arguments[metadata])) return;
  const auto* bits = std::get_if<PickleDict>(arguments[metadata]);
  TORCH_CHECK(bits && bits->items.empty(), what,
              " is stored as a conjugate or negative view, which is not supported: save its resolve_conj().resolve_neg()");
}

// Which ends every archive, but for a comment, which torch.save does not write.
bool has_directory(const ArchivePart& part) {
  constexpr size_t kEnd = 22, kMostComment = 65'535;
  const auto is_in_last = [&](size_t bytes) {
    std::string end(std::min(part.size(), bytes), '\0');
    part.read(part.size() - end.size(), end.data(), end.size(), "end");
    const auto found = end.rfind("PK\x05\x06");
    return found != std::string::npos && found + kEnd <= end.size();
  };
  return is_in_last(kEnd) || is_in_last(kEnd + kMostComment);
}

} // namespace

ArchivePart::ArchivePart(const File& file, int64_t offset, int64_t length) : file_(file), offset_(offset), length_(length) {
  TORCH_CHECK(offset <= file.size() && length <= file.size() - offset, file.path().string(), ": an item of ", length,
              " bytes at ", offset, " in a file of ", file.size());
}

size_t ArchivePart::read(uint64_t position, void* data, size_t bytes, const char* /*what*/) const {
  if (position >= size()) return 0;
  const auto count = std::min<uint64_t>(bytes, size() - position);
  file_.read_at(data, count, offset_ + static_cast<int64_t>(position));
  return count;
}

// The reader's own errors do not say of which file they are, nor what to do.
template <typename Read>
auto Archive::checked(const std::string& problem, const Read& read) const {
  try {
    return read();
  } catch (const c10::Error& error) {
    if (std::string_view(error.what()).find("inline_container") == std::string_view::npos) throw; // the file's own
    TORCH_CHECK(false, what_, ": ", problem, ": the ", part_->size(),
                " bytes are damaged. Copy the file again, or save it again");
  }
}

Archive::Archive(std::shared_ptr<ArchivePart> part, std::string what) : part_(std::move(part)), what_(std::move(what)) {
  TORCH_CHECK(has_directory(*part_), what_, ": no directory of a zip archive is at the end of the ", part_->size(),
              " bytes: the file is cut short. Copy it again, or save it again");
  checked("the directory of the zip archive does not fit it, or torch.save did not write it",
          [&] { reader_ = std::make_unique<PyTorchStreamReader>(part_); });
}

bool Archive::has(const std::string& record) {
  return checked("the zip archive's directory cannot be read", [&] { return reader_->hasRecord(record); });
}

std::string Archive::read(const std::string& record) {
  // Its size is what the archive says, and torch.save does not compress.
  TORCH_CHECK(static_cast<size_t>(bytes(record)) <= part_->size(), what_, ": ", record,
              " is larger than the archive that holds it");
  return checked("the record " + record + " of the zip archive cannot be read", [&] {
    const auto [data, size] = reader_->getRecord(record);
    return std::string(static_cast<const char*>(data.get()), size);
  });
}

int64_t Archive::bytes(const std::string& record) {
  return checked("the zip archive has no record " + record, [&] { return static_cast<int64_t>(reader_->getRecordSize(record)); });
}

bool Archive::is_compressed(const std::string& record) {
  constexpr size_t kMethod = 8; // in the header before the record's data
  uint16_t method = 0;
  const auto position =
      checked("the zip archive has no record " + record, [&] { return reader_->getRecordHeaderOffset(record); });
  return part_->read(position + kMethod, &method, sizeof(method), "header") < sizeof(method) || method != 0;
}

int64_t Archive::data_begin(const std::string& record) {
  return checked("the zip archive has no record " + record,
                 [&] { return static_cast<int64_t>(reader_->getRecordOffset(record)); });
}

at::ScalarType dtype_from_python(const std::string& name, const std::string& what) {
  const auto* found = std::ranges::find(kPythonDtypes, name, &PythonDtype::name);
  TORCH_CHECK(found != kPythonDtypes.end(), what, " has the dtype ", name, ", which is not supported");
  return found->dtype;
}

// _rebuild_tensor_v2(("storage", class, key, device, numel), offset, size, stride, requires_grad, hooks), and of v3 the dtype.
ArchivedTensor archived_tensor(PickleRef value, const std::string& what) {
  const auto function = pickle_class(value);
  const bool names_dtype = function == "torch._utils._rebuild_tensor_v3";
  TORCH_CHECK(names_dtype || function == "torch._utils._rebuild_tensor_v2", what, " is stored as ", function,
              ", which is not supported");
  const auto& arguments = pickle_as<PickleTuple>(pickle_as<PickleObject>(value, what).arguments, what).items;
  TORCH_CHECK(arguments.size() >= (names_dtype ? 7 : 4), what, " is stored with too few arguments");
  check_is_no_view(arguments, names_dtype ? 7 : 6, what);
  const auto& storage = pickle_as<PickleTuple>(pickle_as<PicklePersistent>(arguments[0], what).id, what).items;
  TORCH_CHECK(storage.size() >= 5, what, " has a storage that is not understood");
  ArchivedTensor tensor;
  tensor.dtype = names_dtype ? dtype_from_python(pickle_as<PickleName>(arguments[6], what).name, what)
                             : dtype_of_storage(pickle_as<PickleName>(storage[1], what).name, what);
  tensor.sizes = pickle_sizes(arguments[2], what);
  const auto strides = pickle_sizes(arguments[3], what);
  TORCH_CHECK(strides.size() == tensor.sizes.size() && at::geometry_is_contiguous(tensor.sizes, strides), what,
              " is not stored in row-major order, which is not supported");
  const auto bytes = checked_bytes(tensor.sizes, tensor.dtype);
  TORCH_CHECK(bytes, what, " is too large");
  const auto first = pickle_as<int64_t>(arguments[1], what);
  const auto item = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  TORCH_CHECK(first >= 0 && first <= std::numeric_limits<int64_t>::max() / item, what, " starts at element ", first);
  tensor.record = "data/" + pickle_as<std::string>(storage[2], what);
  tensor.begin = first * item;
  tensor.bytes = *bytes;
  return tensor;
}

int64_t data_begin(Archive& archive, const ArchivedTensor& tensor, const std::string& what) {
  TORCH_CHECK(!archive.is_compressed(tensor.record), what, ": its data is compressed, which is not supported");
  const auto held = archive.bytes(tensor.record);
  TORCH_CHECK(tensor.bytes <= held && tensor.begin <= held - tensor.bytes, what, ": its data is too short");
  return archive.data_begin(tensor.record) + tensor.begin;
}

} // namespace tessera::internal
