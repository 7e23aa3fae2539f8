#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max.h>
#include <ATen/ops/sub.h>
#include <c10/util/StringUtil.h>
#include <tessera/checkpoint/export/convert.h>
#include <tessera/checkpoint/formats/reader.h>

#include <cmath>
#include <cstring>
#include <map>

namespace tessera::internal {

namespace {

constexpr int64_t kComparedBytes = int64_t{64} << 20;

// Counts the elements whose bits differ, and the largest difference of their values: NaN where one of two has none.
struct Difference {
  int64_t elements = 0;
  double largest = 0;

  void add(const at::Tensor& a, const at::Tensor& b) {
    if (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0) return;
    const auto item = static_cast<size_t>(a.element_size());
    const auto* x = static_cast<const char*>(a.const_data_ptr());
    const auto* y = static_cast<const char*>(b.const_data_ptr());
    const auto same_bits = at::empty(a.sizes(), at::kBool);
    auto* same = same_bits.mutable_data_ptr<bool>();
    for (int64_t i = 0; i < a.numel(); ++i) {
      same[i] = std::memcmp(x + i * item, y + i * item, item) == 0;
      elements += same[i] ? 0 : 1;
    }
    const auto dtype = a.is_complex() ? at::kComplexDouble : at::kDouble;
    const auto distance = at::abs(at::sub(a.to(dtype), b.to(dtype))).masked_fill_(same_bits, 0); // of equal infinities it is NaN
    const auto found = at::max(distance).item<double>();
    if (std::isnan(found) || found > largest) largest = std::abs(found);
  }
};

std::string compare(const std::string& name, const IndexedTensor& a, const IndexedTensor& b, Reader& reader_a, Reader& reader_b,
                    const std::function<void(int64_t)>& progress) {
  if (a.dtype != b.dtype || a.sizes != b.sizes) {
    return c10::str(name, ": ", c10::toString(a.dtype), at::IntArrayRef(a.sizes), " and ", c10::toString(b.dtype),
                    at::IntArrayRef(b.sizes));
  }
  Difference difference;
  const auto item = static_cast<int64_t>(c10::elementSize(a.dtype));
  for (const auto& box : split(whole(a.sizes), item, kComparedBytes)) {
    const Piece x{box, at::empty(box.sizes, a.dtype)}, y{box, at::empty(box.sizes, a.dtype)};
    reader_a.read(a, x);
    reader_b.read(b, y);
    difference.add(x.data, y.data);
    progress(static_cast<int64_t>(x.data.nbytes()));
  }
  if (difference.elements == 0) return "";
  return c10::str(name, ": ", difference.elements, " of ", whole(a.sizes).numel(), " elements differ, by at most ",
                  difference.largest);
}

// The entries of two maps with the same name, and findings for the others.
template <typename T, typename Visit>
void match(const std::map<std::string, T>& a, const std::map<std::string, T>& b, std::vector<std::string>& findings,
           const Visit& visit) {
  for (const auto& [name, entry] : a) {
    if (b.count(name) == 0) findings.push_back(name + ": only in the first");
  }
  for (const auto& [name, entry] : b) {
    if (a.count(name) == 0) findings.push_back(name + ": only in the second");
  }
  for (const auto& [name, entry] : a) {
    if (const auto other = b.find(name); other != b.end()) visit(name, entry, other->second);
  }
}

std::map<std::string, const IndexedTensor*> tensors_of(const Index& index) {
  std::map<std::string, const IndexedTensor*> tensors;
  for (const auto& tensor : index.tensors) {
    tensors.emplace(tensor.name, &tensor);
    for (const auto& alias : tensor.aliases) tensors.emplace(alias, &tensor);
  }
  return tensors;
}

} // namespace

std::vector<std::string> differences(const Opened& a, const Opened& b, const std::function<void(int64_t)>& progress) {
  std::vector<std::string> findings;
  const std::map<std::string, StateValue> values_a(a.index.values.begin(), a.index.values.end()),
      values_b(b.index.values.begin(), b.index.values.end());
  match(values_a, values_b, findings, [&](const std::string& name, const StateValue& x, const StateValue& y) {
    const auto text_x = to_text(to_json(x)), text_y = to_text(to_json(y));
    // The text alone tells -0.0 from 0.0, and the value alone texts in which the same was replaced, as not UTF-8.
    if (text_x != text_y || !is_same(x, y)) findings.push_back(name + ": " + text_x + " and " + text_y);
  });
  Reader reader_a(a.source, a.index, a.index.has_checksums), reader_b(b.source, b.index, b.index.has_checksums);
  const auto tensors_a = tensors_of(a.index), tensors_b = tensors_of(b.index);
  match(tensors_a, tensors_b, findings, [&](const std::string& name, const IndexedTensor* x, const IndexedTensor* y) {
    const auto first = tensors_b.find(x->name);
    if (name != x->name && first != tensors_b.end() && first->second == y) return; // tied in both: compared under that name
    if (auto finding = compare(name, *x, *y, reader_a, reader_b, progress); !finding.empty())
      findings.push_back(std::move(finding));
  });
  return findings;
}

} // namespace tessera::internal
