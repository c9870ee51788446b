// What an eager call would otherwise do in Python for every tensor and launch: see native.py.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

// Of dlpack.h 1.x: what a tensor is, and the functions of a tensor type.
typedef struct {
    void *data;
    int32_t device_type, device;
    int32_t dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Tensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *share, *take;
    int (*read)(void *object, Tensor *tensor);  // 0, or -1 with an exception
    void *stream;
} Exchange;

static Exchange *exchange;
static PyTypeObject *tensor_type, *parameter_type;

enum { MOST_DIMS = 4, MOST_TENSORS = 16 };

// What decides how a tensor is read; all zeros for None.
typedef struct {
    int32_t device_type, device, dims, dtype;
    int64_t shape[MOST_DIMS], strides[MOST_DIMS];
} Layout;

// Whether an object is a tensor whose memory holds its values, and its description.
static int is_plain(PyObject *object, Tensor *x) {
    static PyObject *is_neg;
    if (!is_neg && !(is_neg = PyUnicode_InternFromString("is_neg"))) return 0;
    if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) return 0;
    if (exchange->read(object, x) || x->dims > MOST_DIMS) return 0;  // of a batch of vmap's, say
    if (!x->data) return 0;  // zeros without memory, or a storage that has been freed
    PyObject *negative = PyObject_CallMethodNoArgs(object, is_neg);
    Py_XDECREF(negative);
    return negative == Py_False;
}

// describe(*tensors): the layouts, dtypes and devices of tensors or None, as bytes; None if one is not plain.
static PyObject *describe(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
    Layout layouts[MOST_TENSORS];
    if (count > MOST_TENSORS) Py_RETURN_NONE;
    memset(layouts, 0, count * sizeof(Layout));
    for (Py_ssize_t i = 0; i < count; i++) {
        if (objects[i] == Py_None) continue;
        Tensor x;
        if (!is_plain(objects[i], &x)) {
            PyErr_Clear();
            Py_RETURN_NONE;
        }
        Layout *layout = layouts + i;
        layout->device_type = x.device_type;
        layout->device = x.device;
        layout->dims = x.dims + 1;  // a tensor without dimensions is not None
        layout->dtype = x.code << 16 | x.bits;
        for (int d = 0; d < x.dims; d++) {
            layout->shape[d] = x.shape[d];
            layout->strides[d] = x.strides[d];
        }
    }
    return PyBytes_FromStringAndSize((char *)layouts, count * sizeof(Layout));
}

// As in replay.py. Cells are numbers of places in `cells`.
typedef struct {
    int64_t base, offset;
} Moved;
typedef struct {
    int64_t cell, words;
} Fill;
typedef struct {
    int64_t cell, original, bytes;
} Copy;
// CUlaunchConfig of cuda.h.
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream, *attributes;
    unsigned attribute_count;
} Config;
typedef struct {
    Config *config;
    void *function, *parameters;
} Step;
typedef struct {
    int64_t inputs, made, moved, fills, copies, steps, outputs, busy;
    uint64_t *cells;
    Moved *moves;
    Fill *fill;
    Copy *copy;
    Step *step;
    int64_t *output;  // which of what was made; -1 for None
    int (*launch)(Config *config, void *function, void *parameters, void *extra);
    int (*set)(uint64_t address, unsigned value, size_t words, void *stream);
    int (*move)(uint64_t address, uint64_t original, size_t bytes, void *stream);
} Plan;

// Writes the address of a tensor into a cell. Whether it could not.
static int locate(PyObject *object, uint64_t *cell) {
    Tensor x;
    if (exchange->read(object, &x)) return 1;
    *cell = (uint64_t)x.data + x.offset;
    return 0;
}

// The driver's first error, or 0; `done` counts what was queued before it.
static int queue(Plan *plan, void *stream, int *done) {
    int code = 0;
    for (int64_t i = 0; i < plan->fills && !code; i++, *done += !code)
        code = plan->set(plan->cells[plan->fill[i].cell], 0, plan->fill[i].words, stream);
    for (int64_t i = 0; i < plan->copies && !code; i++, *done += !code) {
        Copy *copy = plan->copy + i;
        code = plan->move(plan->cells[copy->cell], plan->cells[copy->original], copy->bytes, stream);
    }
    for (int64_t i = 0; i < plan->steps && !code; i++, *done += !code) {
        Step *step = plan->step + i;
        step->config->stream = stream;
        code = plan->launch(step->config, step->function, step->parameters, NULL);
    }
    return code;
}

static PyObject *outputs(const Plan *plan, PyObject *const *made) {
    PyObject *found = PyTuple_New(plan->outputs);
    for (int64_t i = 0; found && i < plan->outputs; i++) {
        PyObject *x = plan->output[i] < 0 ? Py_None : made[plan->output[i]];
        Py_INCREF(x);
        PyTuple_SET_ITEM(found, i, x);
    }
    return found;
}

// repeat(plan, makers, stream, *tensors): the outputs; None if nothing was queued, for a reason that the ordinary pass
// finds out; or the driver's error.
static PyObject *repeat(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
    Plan *plan = PyLong_AsVoidPtr(objects[0]);
    PyObject *makers = objects[1];
    void *stream = PyLong_AsVoidPtr(objects[2]);
    if (PyErr_Occurred()) return NULL;
    if (plan->made > MOST_TENSORS) Py_RETURN_NONE;
    if (plan->busy) Py_RETURN_NONE;  // another thread is in the driver, and needs the cells as they are
    plan->busy = 1;
    PyObject *made[MOST_TENSORS], *found = NULL;
    int64_t cell = 0, kept = 0;
    uint64_t bits = 0;
    for (Py_ssize_t i = 3; i < count; i++) {
        if (objects[i] == Py_None) continue;
        if (cell == plan->inputs || locate(objects[i], plan->cells + cell)) goto unable;
        bits |= plan->cells[cell++];
    }
    if (cell != plan->inputs || bits & 15) goto unable;
    for (; kept < plan->made; kept++) {
        made[kept] = PyObject_CallNoArgs(PyTuple_GET_ITEM(makers, kept));
        if (!made[kept]) goto unable;  // smaller blocks, one after the other, may still fit
        if (locate(made[kept], plan->cells + cell++)) {
            kept++;
            goto unable;
        }
    }
    for (int64_t i = 0; i < plan->moved; i++)
        plan->cells[cell + i] = plan->cells[plan->moves[i].base] + plan->moves[i].offset;
    int code, done = 0;
    Py_BEGIN_ALLOW_THREADS
    code = queue(plan, stream, &done);
    Py_END_ALLOW_THREADS
    if (!code)
        found = outputs(plan, made);
    else if (done)
        found = PyLong_FromLong(code);
unable:
    if (!found && PyErr_Occurred()) PyErr_Clear();
    plan->busy = 0;
    while (kept) Py_DECREF(made[--kept]);
    if (found) return found;
    Py_RETURN_NONE;
}

// use(capsule, Tensor, Parameter): takes the functions of torch's tensors. Whether their version is known here.
static PyObject *use(PyObject *module, PyObject *arguments) {
    PyObject *capsule;
    PyTypeObject *tensor, *parameter;
    if (!PyArg_ParseTuple(arguments, "OO!O!", &capsule, &PyType_Type, &tensor, &PyType_Type, &parameter)) return NULL;
    Exchange *offered = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!offered) return NULL;
    if (offered->major != 1 || !offered->read) Py_RETURN_FALSE;
    exchange = offered;  // only now: functions that are in use keep what they have
    tensor_type = tensor;
    parameter_type = parameter;
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"describe", (PyCFunction)(void (*)(void))describe, METH_FASTCALL, NULL},
    {"repeat", (PyCFunction)(void (*)(void))repeat, METH_FASTCALL, NULL},
    {"use", use, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "gla_kernels_native", NULL, -1, methods};

PyMODINIT_FUNC PyInit_gla_kernels_native(void) { return PyModule_Create(&definition); }
