#include "gather.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace padam {

namespace {

py::object checked(PyObject* new_reference) {
  if (new_reference == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(new_reference);
}

// Calls an unbound method of torch.Tensor without arguments; whether it answers True.
bool is_true(const py::object& method, PyObject* tensor) {
  return checked(PyObject_Vectorcall(method.ptr(), &tensor, 1, nullptr)).ptr() == Py_True;
}

// The objects of a thousand parameters, some 200 bytes here and there for each, have left the
// caches since the last step; waiting for memory is most of the time spent here. Prefetching never
// faults, so it does not matter whether a place is still what it was.
constexpr std::size_t kPrefetchAhead = 8;
constexpr std::size_t kStatesPrefetchAhead = 32;  // tensors and dicts

void prefetch(const void* place) {
  if (place == nullptr) return;
  const char* line = static_cast<const char*>(place);
  __builtin_prefetch(line - 64);
  __builtin_prefetch(line);
  __builtin_prefetch(line + 64);
}

// The states of an optimizer, asked for by parameter. They usually lie in the order of the
// parameters, and to look one up by its hash calls Python's Tensor.__hash__: so the next one is
// tried first.
class StatesInTurn {
 public:
  explicit StatesInTurn(const py::object& states) : states_(states) {}

  // None where there is none.
  py::object of(py::handle param) {
    PyObject* key = nullptr;
    PyObject* state = nullptr;
    while (PyDict_Check(states_.ptr()) && PyDict_Next(states_.ptr(), &next_, &key, &state) != 0) {
      if (key == param.ptr()) return py::reinterpret_borrow<py::object>(state);
    }
    return checked(PyObject_CallMethod(states_.ptr(), "get", "O", param.ptr()));
  }

 private:
  const py::object& states_;
  Py_ssize_t next_ = 0;
};

std::int64_t as_word(const void* pointer) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer));
}

py::bytes as_bytes(const std::int64_t* words, std::size_t count) {
  return {reinterpret_cast<const char*>(words), count * sizeof(std::int64_t)};
}

// DLPack's codes.
constexpr std::uint8_t kFloat = 2;
constexpr std::uint8_t kBfloat = 4;
constexpr std::uint8_t kComplex = 5;

bool is_in_a_row(const DLTensor& tensor) {
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

// Whether a tensor is lazily negated or conjugated has to be asked each time, for the same object
// at the same address may be so now although it was not before. Asking costs as much as all the
// rest, so it is done only where the answer can be yes. Of real tensors, that is `imag` of a
// conjugated one and views of it: they step over the real parts, so that strides along more than
// one element are even. (Only as_strided and torch's private _neg_view make others. Those are seen
// when they come, but not when they replace a tensor of the same address and strides.)
bool may_be_negated(const DLTensor& tensor) {
  if (tensor.dtype.code == kComplex) return true;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] % 2 != 0) return false;
  }
  return true;
}

}  // namespace

void Gatherer::prefetch(const Seen& seen) {
  for (const void* place : seen.places) padam::prefetch(place);
}

void Reading::end_piece(bool readable, bool plain) {
  if (!readable) {
    readable_ = false;
    unreadable_.push_back(ends_.size());
  }
  ends_.push_back(words_.size());
  plain_.push_back(plain ? 1 : 0);
}

py::list Reading::pieces() const {
  py::list pieces;
  auto unreadable = unreadable_.begin();
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    if (unreadable != unreadable_.end() && *unreadable == i) {
      ++unreadable;
      pieces.append(py::none());
      continue;
    }
    const std::size_t begin = i == 0 ? 0 : ends_[i - 1];
    pieces.append(as_bytes(words_.data() + begin, ends_[i] - begin));
  }
  return pieces;
}

Gatherer::Gatherer(const py::object& tensor_class, const py::object& parameter_class,
                   py::object unwrap)
    : tensor_class_(tensor_class),
      parameter_class_(parameter_class),
      unwrap_(std::move(unwrap)),
      is_neg_(tensor_class.attr("is_neg")),
      is_conj_(tensor_class.attr("is_conj")),
      grad_(py::str("grad")),
      local_tensor_(py::str("_local_tensor")),
      spec_(py::str("_spec")) {
  const py::object capsule = tensor_class.attr("__dlpack_c_exchange_api__");
  api_ = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api_ == nullptr) throw py::error_already_set();
  if (api_->version.major != 1 || api_->dltensor_from_py_object_no_sync == nullptr) {
    throw std::invalid_argument("torch offers DLPack " + std::to_string(api_->version.major) +
                                " where version 1 is needed");
  }
}

bool Gatherer::is_dtensor(PyObject* tensor, const py::object& dtensor) const {
  return !dtensor.is_none() &&
         PyObject_TypeCheck(tensor, reinterpret_cast<PyTypeObject*>(dtensor.ptr())) != 0;
}

bool Gatherer::is_torchs_own(PyObject* tensor) const {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  return type == tensor_class_.ptr() || type == parameter_class_.ptr();
}

py::object Gatherer::unwrapped(py::object tensor) const {
  return is_torchs_own(tensor.ptr()) ? tensor : unwrap_(tensor);
}

Gatherer::Place Gatherer::read(PyObject* tensor, const py::object& dtensor, Reading& reading,
                               Seen& seen) const {
  seen.places[0] = tensor;
  py::object shard = py::reinterpret_borrow<py::object>(tensor);
  if (is_dtensor(tensor, dtensor)) {
    const py::object spec = checked(PyObject_GetAttr(tensor, spec_.ptr()));
    // Mesh and placements, in a hash; asking for it calls Python.
    if (spec.ptr() != seen.spec.ptr()) {
      seen.spec_hash = py::hash(spec);
      seen.spec = spec;
    }
    reading.add(seen.spec_hash);
    shard = checked(PyObject_GetAttr(tensor, local_tensor_.ptr()));
    seen.places[1] = shard.ptr();
  }
  const py::object keep = unwrapped(std::move(shard));
  DLTensor read;
  if (api_->dltensor_from_py_object_no_sync(keep.ptr(), &read) != 0) {
    throw py::error_already_set();
  }
  const bool is_neg = may_be_negated(read) && is_true(is_neg_, keep.ptr());
  const bool is_conj = read.dtype.code == kComplex && is_true(is_conj_, keep.ptr());
  reading.add((static_cast<std::int64_t>(read.device.device_type) << 32) | read.device.device_id);
  reading.add((static_cast<std::int64_t>(read.ndim) << 32) | (read.dtype.code << 16) |
              (read.dtype.bits << 2) | (is_neg ? 2 : 0) | (is_conj ? 1 : 0));
  reading.add(read.shape, read.ndim);
  reading.add(read.strides, read.ndim);
  seen.places[2] = read.shape;  // inside of the tensor's own memory
  const bool is_float = read.dtype.code == kFloat || read.dtype.code == kBfloat;
  return {as_word(read.data) + static_cast<std::int64_t>(read.byte_offset),
          is_torchs_own(tensor) && is_float && !is_neg && is_in_a_row(read)};
}

py::tuple Gatherer::gather(const py::list& selection, const py::object& dtensor) {
  py::list params;
  py::list grads;
  std::vector<std::int64_t> group_indices;
  std::vector<std::int64_t> grad_addresses;
  Reading reading;
  // Taken out and put back: while torch is asked, another thread may make a pass.
  std::vector<std::array<Seen, 2>> seen = std::exchange(seen_, {});
  reading.expect(num_words_, seen.size());
  group_indices.reserve(seen.size());
  grad_addresses.reserve(seen.size());
  std::size_t count = 0;
  for (const py::handle part : selection) {
    const auto [group_index, members] = py::cast<std::pair<std::int64_t, py::list>>(part);
    for (const py::handle param : members) {
      if (count + kPrefetchAhead < seen.size()) {
        for (const Seen& ahead : seen[count + kPrefetchAhead]) prefetch(ahead);
      }
      const py::object grad = checked(PyObject_GetAttr(param.ptr(), grad_.ptr()));
      if (grad.is_none()) continue;
      params.append(param);
      grads.append(grad);
      group_indices.push_back(group_index);
      if (count == seen.size()) seen.emplace_back();
      auto& [param_seen, grad_seen] = seen[count++];
      Place param_place{};
      Place grad_place{};
      bool readable = true;
      bool plain = false;
      try {
        reading.add(as_word(param.ptr()));
        reading.add(group_index);
        const std::size_t param_begin = reading.num_words();
        param_place = read(param.ptr(), dtensor, reading, param_seen);
        reading.add(param_place.address);
        const std::size_t grad_begin = reading.num_words();
        grad_place = read(grad.ptr(), dtensor, reading, grad_seen);
        const std::size_t count = reading.num_words() - grad_begin;
        // Empty, or without memory that a kernel could reach.
        reading.add(grad_place.address == 0);
        plain = param_place.is_plain && grad_place.is_plain && param_place.address != 0 &&
                grad_place.address != 0 && count == grad_begin - param_begin - 1 &&
                reading.same_words(param_begin, grad_begin, count);
      } catch (const py::error_already_set&) {
        readable = false;  // a sparse gradient, say; the checks later say what is wrong
      }
      reading.end_piece(readable, plain);
      grad_addresses.push_back(grad_place.address);
    }
  }
  seen.resize(count);
  seen_ = std::move(seen);
  num_words_ = reading.num_words();
  return py::make_tuple(params, grads, as_bytes(group_indices.data(), group_indices.size()),
                        std::move(reading), as_bytes(grad_addresses.data(), grad_addresses.size()));
}

Reading Gatherer::read_states(const py::object& states, const py::list& params,
                              const py::tuple& keys, const py::object& dtensor) {
  Reading reading;
  std::vector<Seen> seen = std::exchange(states_seen_, {});
  reading.expect(num_state_words_, params.size());
  StatesInTurn states_in_turn(states);
  std::size_t count = 0;
  const auto next_seen = [&]() -> Seen& {
    if (count + kStatesPrefetchAhead < seen.size()) prefetch(seen[count + kStatesPrefetchAhead]);
    if (count == seen.size()) seen.emplace_back();
    return seen[count++];
  };
  for (const py::handle param : params) {
    const py::object state = states_in_turn.of(param);
    bool readable = PyDict_Check(state.ptr());
    if (readable) {
      Seen& dict_seen = next_seen();
      dict_seen.places[0] = state.ptr();
      dict_seen.places[1] = reinterpret_cast<PyDictObject*>(state.ptr())->ma_keys;
    }
    for (const py::handle key : keys) {
      if (!readable) break;
      PyObject* value = PyDict_GetItemWithError(state.ptr(), key.ptr());
      if (value == nullptr) {
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        reading.add(0);
        continue;
      }
      if (PyLong_Check(value)) {
        int overflow = 0;
        reading.add(PyLong_AsLongLongAndOverflow(value, &overflow));
        readable = overflow == 0;
        continue;
      }
      try {
        reading.add(read(value, dtensor, reading, next_seen()).address);
      } catch (const py::error_already_set&) {
        readable = false;  // no tensor, or one without an address
      }
    }
    reading.end_piece(readable);
  }
  seen.resize(count);
  states_seen_ = std::move(seen);
  num_state_words_ = reading.num_words();
  return reading;
}

}  // namespace padam
